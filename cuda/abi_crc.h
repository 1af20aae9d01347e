/* Job structs of the kernel that sums stored bytes (crc.cuh). Rules as in abi.h: plain
 * C, fixed sizes, no padding; addresses may be odd here. */
#ifndef OVERWIRE_ABI_CRC_H
#define OVERWIRE_ABI_CRC_H

#include <stdint.h>

/* One warp's work: `bytes` bytes at src, at most OW_CRC_PART. Its word of the result is
 * what these bytes add to the CRC-32C of what they end: the remainder of the
 * bytes' polynomial times `behind`, x^(8 * bytes behind the part). Where src + bytes is no
 * multiple of 4, `behind` is divided by x^8 for each byte up to the next one. */
typedef struct ow_crc_part {
    uint64_t src;
    uint32_t bytes, behind;
} ow_crc_part; /* 16 bytes */

enum { OW_CRC_PART = 8 << 10 };

#endif
