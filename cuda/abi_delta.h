/* Job structs of the kernels of XOR deltas (delta.cuh). Rules as in abi.h: plain C,
 * fixed sizes, no padding.
 *
 *   ow_delta_apply(rows, n)    XOR stored chunks into tensors
 *   ow_delta_measure(rows, n)  how long the delta of a chunk is: stored, head
 *   ow_delta_write(rows, n)    the delta of a chunk, as measured
 *
 * Launch: block OW_DELTA_THREADS, any grid, no dynamic shared memory. A warp does a row. */
#ifndef OVERWIRE_ABI_DELTA_H
#define OVERWIRE_ABI_DELTA_H

#include <stdint.h>

/* One chunk. now and base are multiples of the element, at one of 4. */
typedef struct ow_delta_row {
    uint64_t now;     /* apply: what is changed */
    uint64_t base;    /* of the encoder only */
    uint64_t at;      /* the stored chunk; not of measure */
    uint32_t bytes;   /* logical, at least one element */
    uint32_t stored;  /* measure writes it: 0 if nothing changed */
    uint32_t lg;      /* log2 of the bytes of an element, 0 to 3 */
    uint32_t pad;
    uint32_t head[4]; /* measure writes it: the first 16 bytes of the stored chunk */
} ow_delta_row;       /* 56 bytes */

/* Shared memory of a warp: of apply, and of the encoder. */
enum { OW_DELTA_THREADS = 256, OW_DELTA_TABLE = 512, OW_DELTA_SHARED = 4864 };

#endif
