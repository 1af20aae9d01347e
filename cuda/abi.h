/* Job structs shared by the X16 kernels, their host twin and the launcher.
 *
 * Plain C, fixed sizes, little-endian, no padding, so the launcher can build them
 * in any language. All values come from the file's index (docs/format.md 2). The
 * stored bytes are not read to fill the structs.
 *
 * A launch decodes `n` segment jobs of one transform. Stored bytes may be corrupt,
 * because a chunk's checksum may be compared after the launch (abi_crc.h). For any
 * stored bytes, the kernels read only [src, src + stored), write only
 * [dst, dst + logical), and report errors as bits in status[chunk.status].
 */
#ifndef OVERWIRE_ABI_H
#define OVERWIRE_ABI_H

#include <stdint.h>

/* One stored chunk and the destination of its logical bytes. */
typedef struct ow_x16_chunk {
    uint64_t src;      /* device address of the stored bytes, multiple of 16 */
    uint64_t dst;      /* device address of the logical bytes, multiple of 16 */
    uint32_t stored;   /* bytes at src; at least 96, else OW_X16_LAYOUT */
    uint32_t logical;  /* bytes at dst */
    uint16_t tiles;    /* tiles per segment, 1..256 (offset 24 of the chunk record) */
    uint16_t zero;
    uint32_t status;   /* index of the status word for this chunk's errors */
} ow_x16_chunk;        /* 32 bytes */

/* The work of one warp: one segment. A chunk of T tiles has max(1, ceil(T / tiles))
 * segments. The warp of the last segment also copies the tail. */
typedef struct ow_x16_seg {
    uint32_t chunk; /* index into the chunk array */
    uint32_t seg;   /* segment number inside the chunk */
} ow_x16_seg;       /* 8 bytes */

/* Transforms, docs/format.md 3.1. */
enum {
    OW_BF16 = 1, OW_FP16 = 2, OW_FP32 = 3, OW_E4M3 = 4,
    OW_E5M2 = 5, OW_INT8 = 6, OW_NIBBLES = 7, OW_BYTES = 8
};

/* Bits of a status word; 0 means no error. The host zeroes the words before a
 * launch, and the kernels only set bits. */
enum {
    OW_X16_LAYOUT = 1, /* header, directory or planes do not fit the chunk */
    OW_X16_STATE = 2,  /* a lane's state begins below 2^16 or does not end at 2^16 */
    OW_X16_WORDS = 4,  /* words and escapes do not end at the segment's end */
    OW_X16_ESCAPE = 8  /* an escape is outside its segment, or not after the previous one */
};

/* Warps per block and bytes of dynamic shared memory. Launch with
 * grid = ceil(n / OW_X16_WARPS), block = 32 * OW_X16_WARPS. */
enum { OW_X16_WARPS = 8, OW_X16_SHARED = OW_X16_WARPS * (1024 + 1024 + 256) };

#endif
