/* Job structs of the kernels that copy and cast (move.cuh). Rules as in abi.h:
 * plain C, fixed sizes, no padding; addresses may be odd here. */
#ifndef OVERWIRE_ABI_MOVE_H
#define OVERWIRE_ABI_MOVE_H

#include <stdint.h>

/* `rows` runs of `width` bytes, a pitch apart: a strided gather, or with one
 * row a copy. Source and destination do not overlap. */
typedef struct ow_move {
    uint64_t src, dst;
    uint64_t src_pitch, dst_pitch;
    uint32_t width, rows;
} ow_move; /* 40 bytes */

/* Elements of one type from src become elements of another at dst, each
 * aligned to its element. */
typedef struct ow_cast {
    uint64_t src, dst, n;
    uint32_t from, to; /* OW_CAST_... */
} ow_cast; /* 32 bytes */

/* One warp's work: part number `part` of move or cast `job`. */
typedef struct ow_part {
    uint32_t job, part;
} ow_part; /* 8 bytes */

enum { OW_CAST_F32 = 0, OW_CAST_BF16 = 1, OW_CAST_F16 = 2, OW_CAST_E4M3 = 3, OW_CAST_E5M2 = 4 };

/* A part of a move is OW_MOVE_PART bytes of one row, or, where rows are
 * shorter, as many whole rows as fit; see ow_move_parts. A part of a cast is
 * OW_CAST_PART elements. */
enum { OW_MOVE_PART = 16 << 10, OW_CAST_PART = 4096 };

/* How many parts a move has; never 0 rows or width. */
static inline uint64_t ow_move_parts(uint32_t width, uint32_t rows) {
    uint32_t each = OW_MOVE_PART / width;
    if (each == 0) return (uint64_t)rows * ((width + OW_MOVE_PART - 1) / OW_MOVE_PART);
    return (rows + each - 1) / each;
}

#endif
