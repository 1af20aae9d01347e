/* The interface of all batch kernels. A batch has many chunks; each chunk is an item.
 * Plain C, fixed sizes, no padding, as in abi.h.
 *
 * Launch: kernel(ow_batch_item *items, uint32_t n), block OW_BATCH_THREADS,
 * grid ow_batch_blocks(per, n), no dynamic shared memory. The table gives `per`, the
 * items per block. A larger grid is allowed. Items, sources and destinations are in
 * device memory and do not overlap. Every status is 0 before the launch.
 *
 *   kernel               per  arg
 *   ow_lz4_decode          4  0
 *   ow_snappy_decode       4  0
 *   ow_cascaded_decode     4  0
 *   ow_x16_encode          1  transform; the kernel ORs in tiles per segment << 16
 *   ow_hash_sums           1  bytes of the tail
 *
 * ow_hash_sums accepts blocks of any number of warps. For each whole KiB of the source it
 * writes 64 bytes of sums (hash.cuh) to dst. After the sums it writes the tail: the last
 * `arg` bytes before the end of the source. The tail may begin before src. src is a multiple
 * of 8, and dst may be mapped host memory. The kernel sets neither written nor status.
 *
 * ow_x16_encode accepts blocks of up to OW_BATCH_MOST threads, because large chunks need
 * more than OW_BATCH_WARPS warps. ow_x16_threads returns the best block size.
 *
 * If the status of an item is 0, `written` bytes are at dst. Any other status says why the
 * item was refused; the bytes at dst are then undefined. For any input, the encoder and the
 * decoders read only [src, src + src_len) and write only [dst, dst + dst_cap).
 */
#ifndef OVERWIRE_ABI_BATCH_H
#define OVERWIRE_ABI_BATCH_H

#include <stdint.h>

#ifndef OVERWIRE_BATCH_ITEM
#define OVERWIRE_BATCH_ITEM
typedef struct ow_batch_item {
    uint64_t src, src_len; /* src: any alignment; X16: a multiple of 16 */
    uint64_t dst, dst_cap; /* dst: as src. Lengths are below 2^31; an X16 chunk has at most 16 MiB */
    uint64_t written;      /* result */
    uint32_t status;       /* result: 0 or a bit of the enum below */
    uint32_t arg;
} ow_batch_item; /* 48 bytes */
#endif

enum {
    OW_BATCH_INPUT = 16,  /* the input is truncated, too long or malformed */
    OW_BATCH_OFFSET = 32, /* a match begins before the first output byte */
    OW_BATCH_ROOM = 64,   /* the output does not fit dst_cap */
    OW_BATCH_GAIN = 128,  /* X16: coding saves too little; store the raw bytes */
    OW_BATCH_ARG = 256    /* arg, an address or a length is invalid */
};

enum { OW_BATCH_WARPS = 4, OW_BATCH_THREADS = 32 * OW_BATCH_WARPS, OW_BATCH_MOST = 512 };

static inline uint32_t ow_batch_blocks(uint32_t per, uint32_t n) { return (n + per - 1) / per; }

/* Returns the best block size, in threads, to encode chunks of `chunk` bytes. */
static inline uint32_t ow_x16_threads(uint64_t chunk) { return chunk <= 1 << 20 ? 128 : chunk <= 2 << 20 ? 256 : 512; }

#endif
