/* Job structs of the XOR delta kernels (delta.cuh). Plain C, fixed sizes, no padding, as
 * in abi.h.
 *
 *   ow_delta_apply(rows, n)    XORs stored chunks into tensors
 *   ow_delta_measure(rows, n)  computes the size and the head of each chunk's delta
 *   ow_delta_write(rows, n)    writes the deltas after they were measured
 *
 * Launch: block OW_DELTA_THREADS, any grid, no dynamic shared memory. One warp per row. */
#ifndef OVERWIRE_ABI_DELTA_H
#define OVERWIRE_ABI_DELTA_H

#include <stdint.h>

/* One chunk. now and base are aligned to the element size, at is aligned to 4. */
typedef struct ow_delta_row {
    uint64_t now;     /* encoder: the new bytes; apply: the bytes to change in place */
    uint64_t base;    /* encoder only: the bytes before the change */
    uint64_t at;      /* the stored chunk; unused by measure */
    uint32_t bytes;   /* logical bytes, at least one element */
    uint32_t stored;  /* bytes at `at`; measure writes it, 0 if nothing changed */
    uint32_t lg;      /* log2 of the element size, 0 to 3 */
    uint32_t pad;
    uint32_t head[4]; /* the first 16 bytes of the stored chunk; measure writes it */
} ow_delta_row;       /* 56 bytes */

/* Bytes of shared memory per warp: OW_DELTA_TABLE in apply, OW_DELTA_SHARED in measure and write. */
enum { OW_DELTA_THREADS = 256, OW_DELTA_TABLE = 512, OW_DELTA_SHARED = 4864 };

#endif
