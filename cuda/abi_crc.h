/* Job structs of the kernel that computes CRCs of stored bytes (crc.cuh). Plain C, fixed
 * sizes, no padding, as in abi.h. Addresses need no alignment. */
#ifndef OVERWIRE_ABI_CRC_H
#define OVERWIRE_ABI_CRC_H

#include <stdint.h>

/* The work of one warp: `bytes` bytes at src, at most OW_CRC_PART. The result is the part's
 * share of the chunk's CRC-32C: the remainder of the part's polynomial, times `behind`.
 * `behind` is x^(8 * n), where n is the number of chunk bytes after the part. If src + bytes
 * is not a multiple of 4, the kernel also sums zeros up to the next multiple. n is then
 * reduced by the number of zeros, and may be negative. */
typedef struct ow_crc_part {
    uint64_t src;
    uint32_t bytes, behind;
} ow_crc_part; /* 16 bytes */

enum { OW_CRC_PART = 8 << 10 };

#endif
