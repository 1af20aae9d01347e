/* Job structs of the kernels that compute tensor digests (digest.cuh). Plain C, fixed
 * sizes, no padding, as in abi.h.
 *
 *   ow_digest(jobs, n, tiles, dims, sums)
 *   ow_digest_keyed(jobs, n, tiles, dims, sums)
 *
 * Launch: block OW_DIGEST_THREADS, any grid, no shared memory. The warps divide the
 * tiles of all jobs among themselves. sums has two words per job, which the host zeroes
 * before the launch. The kernel computes the sums a and b of gosrc/codec/digest in these
 * words, and the host computes the digest from a and b. ow_digest_keyed does the same for
 * keyed digests. The OW_DIGEST_KEY words before sums are the key. */
#ifndef OVERWIRE_ABI_DIGEST_H
#define OVERWIRE_ABI_DIGEST_H

#include <stdint.h>

/* One tensor of at least one byte. The tiles of all jobs are numbered consecutively: job 0
 * begins at tile 0, and every other job where the previous one ends. */
typedef struct ow_digest_job {
    uint64_t src;
    uint64_t bytes; /* size of all elements, without gaps */
    uint64_t first; /* number of the first tile; a tile has OW_DIGEST_TILE bytes */
    uint32_t dims;  /* index of the first dimension in dims */
    uint16_t rank;  /* 0: the tensor is contiguous and src is a multiple of item */
    uint16_t item;  /* contiguous: 16 or 8; strided: the element size, 1, 2, 4 or 8 */
} ow_digest_job;    /* 32 bytes */

/* One dimension of a strided tensor. The outermost dimension comes first. src and all
 * strides are multiples of item. */
typedef struct ow_digest_dim {
    uint64_t size;
    int64_t stride; /* bytes */
} ow_digest_dim;    /* 16 bytes */

enum { OW_DIGEST_THREADS = 256, OW_DIGEST_TILE = 4096, OW_DIGEST_BLOCKS = 4 /* per SM */, OW_DIGEST_KEY = 18 };

#endif
