/* Job structs of the kernel that computes digests of tensors (digest.cuh). Rules as
 * in abi.h: plain C, fixed sizes, no padding.
 *
 *   ow_digest(jobs, n, tiles, dims, sums)
 *
 * Launch: block OW_DIGEST_THREADS, any grid, no shared memory. The warps share the
 * tiles of all jobs. sums has two words a job, which the host has set to 0: the
 * digest's a and b of gosrc/codec/digest, which the host finishes. */
#ifndef OVERWIRE_ABI_DIGEST_H
#define OVERWIRE_ABI_DIGEST_H

#include <stdint.h>

/* One tensor that has bytes. Jobs are in the order of their first tiles: job 0
 * begins at tile 0, each other one where the one before it ends. */
typedef struct ow_digest_job {
    uint64_t src;
    uint64_t bytes; /* of the contiguous tensor */
    uint64_t first; /* tile, of OW_DIGEST_TILE bytes */
    uint32_t dims;  /* index of its first dim */
    uint16_t rank;  /* 0: contiguous, src a multiple of item */
    uint16_t item;  /* contiguous: 16 or 8; else bytes of an element: 1, 2, 4 or 8 */
} ow_digest_job;    /* 32 bytes */

/* One dimension of a strided tensor, the outermost first. src and all strides are
 * multiples of the item. */
typedef struct ow_digest_dim {
    uint64_t size;
    int64_t stride; /* bytes */
} ow_digest_dim;    /* 16 bytes */

enum { OW_DIGEST_THREADS = 256, OW_DIGEST_TILE = 4096, OW_DIGEST_BLOCKS = 4 /* a processor */ };

#endif
