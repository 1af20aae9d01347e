/* Job structs of the copy and cast kernels (move.cuh). Plain C, fixed sizes, no
 * padding, as in abi.h. */
#ifndef OVERWIRE_ABI_MOVE_H
#define OVERWIRE_ABI_MOVE_H

#include <stdint.h>

/* Copies `rows` rows of `width` bytes. The pitch is the distance from one row to the
 * next. Addresses need no alignment. Source and destination do not overlap. */
typedef struct ow_move {
    uint64_t src, dst;
    uint64_t src_pitch, dst_pitch;
    uint32_t width, rows;
} ow_move; /* 40 bytes */

/* Converts n elements at src to another type at dst. src and dst are aligned to the
 * size of their elements. */
typedef struct ow_cast {
    uint64_t src, dst, n;
    uint32_t from, to; /* OW_CAST_... */
} ow_cast; /* 32 bytes */

/* The work of one warp: part `part` of move or cast `job`. */
typedef struct ow_part {
    uint32_t job, part;
} ow_part; /* 8 bytes */

enum { OW_CAST_F32 = 0, OW_CAST_BF16 = 1, OW_CAST_F16 = 2, OW_CAST_E4M3 = 3, OW_CAST_E5M2 = 4 };

/* A part of a move is OW_MOVE_PART bytes of one row. If rows are shorter, it is as
 * many whole rows as fit into OW_MOVE_PART bytes. A part of a cast is OW_CAST_PART
 * elements. */
enum { OW_MOVE_PART = 16 << 10, OW_CAST_PART = 4096 };

/* Returns the number of parts of a move. width and rows are at least 1. */
static inline uint64_t ow_move_parts(uint32_t width, uint32_t rows) {
    uint32_t each = OW_MOVE_PART / width;
    if (each == 0) return (uint64_t)rows * ((width + OW_MOVE_PART - 1) / OW_MOVE_PART);
    return (rows + each - 1) / each;
}

#endif
