/* The one interface of the batch kernels: many chunks, each an item of its own.
 * Plain C, fixed sizes, no padding, as in abi.h.
 *
 * Launch: kernel(const ow_batch_item *items, uint32_t n), block OW_BATCH_THREADS,
 * grid ow_batch_blocks(per, n), no dynamic shared memory. `per` is in the kernel's
 * line below; a larger grid is allowed. Items, sources and
 * destinations lie in device memory and do not overlap; every status is 0.
 *
 *   kernel               per  arg
 *   ow_lz4_decode          4  0
 *   ow_snappy_decode       4  0
 *   ow_cascaded_decode     4  0
 *   ow_x16_encode          1  transform; afterwards | tiles per segment << 16
 *   ow_hash_sums           1  bytes of the tail
 *
 * ow_hash_sums takes blocks of any number of warps, and writes to dst 64 bytes of sums
 * (hash.cuh) for each whole KiB of the source, and behind them the `arg` bytes that end
 * with the source, whose first ones may lie before src. src is a multiple of 8; dst may be
 * mapped memory of the host. It sets neither written nor status.
 *
 * Large chunks want more than four warps: ow_x16_encode takes blocks of up to
 * OW_BATCH_MOST threads (ow_x16_threads says how many are best).
 *
 * An item whose status is 0 has `written` bytes at dst. Another status says why the
 * item was refused, and its dst is undefined. Whatever its bytes are, the kernels
 * read only [src, src + src_len) and write only [dst, dst + dst_cap).
 */
#ifndef OVERWIRE_ABI_BATCH_H
#define OVERWIRE_ABI_BATCH_H

#include <stdint.h>

#ifndef OVERWIRE_BATCH_ITEM
#define OVERWIRE_BATCH_ITEM
typedef struct ow_batch_item {
    uint64_t src, src_len; /* any alignment; X16: multiples of 16 */
    uint64_t dst, dst_cap; /* likewise; each length below 2^31, of X16's chunks 16 MiB */
    uint64_t written;      /* result */
    uint32_t status;       /* result: 0, bits of abi.h (X16 alone), or of the enum */
    uint32_t arg;
} ow_batch_item; /* 48 bytes */
#endif

enum {
    OW_BATCH_INPUT = 16,  /* the input ends too early, too late, or makes no sense */
    OW_BATCH_OFFSET = 32, /* a match reaches back before the first byte */
    OW_BATCH_ROOM = 64,   /* the output does not fit dst_cap */
    OW_BATCH_GAIN = 128,  /* X16: coding gains too little; store the bytes as they are */
    OW_BATCH_ARG = 256    /* arg, an address or a length is invalid */
};

enum { OW_BATCH_WARPS = 4, OW_BATCH_THREADS = 32 * OW_BATCH_WARPS, OW_BATCH_MOST = 512 };

static inline uint32_t ow_batch_blocks(uint32_t per, uint32_t n) { return (n + per - 1) / per; }

/* Threads of a block that encodes chunks of this many bytes. */
static inline uint32_t ow_x16_threads(uint64_t chunk) { return chunk <= 1 << 20 ? 128 : chunk <= 2 << 20 ? 256 : 512; }

#endif
