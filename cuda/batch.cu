// The batch kernels of abi_batch.h. The decoders use one warp per item, because the elements
// of an item depend on each other. The encoder and ow_hash_sums use one block per item, and
// its warps share the work.
#include "cascaded_decode.cuh"
#include "hash.cuh"
#include "lz4_decode.cuh"
#include "snappy_decode.cuh"
#include "x16_encode.cuh"

static_assert(sizeof(ow_batch_item) == 48, "abi_batch.h must have no padding");

// One warp per item. `blocks` is per SM: 12 blocks allow 40 registers per thread, 16 allow 32.
#define OW_WARP_KERNEL(name, job_body, bytes, blocks)                                               \
    extern "C" __global__ void __launch_bounds__(OW_BATCH_THREADS, blocks)                           \
        name(ow_batch_item* items, uint32_t n) {                                                     \
        __shared__ __align__(1024) ow::u8 shared[bytes];                                             \
        uint32_t warp_id = ow::warp_of_block(), job = blockIdx.x * OW_BATCH_WARPS + warp_id;         \
        if (job < n) job_body(items, job, (uint32_t)__cvta_generic_to_shared(shared), warp_id);      \
    }

// LZ4 and Snappy: the warp reads 32 bytes of input at a time, and decodes the short elements
// that begin in them in parallel (lz.cuh). Shared memory: a ring of input and a table of
// copies per warp.
OW_WARP_KERNEL(ow_lz4_decode, ow::decode_lz_item<ow::Lz4>, ow::kLzShared, 16)
OW_WARP_KERNEL(ow_snappy_decode, ow::decode_lz_item<ow::Snappy>, ow::kLzShared, 16)
// Cascaded: the warp decodes one layer of differences or runs at a time, from one of its two
// buffers in shared memory to the other (cascaded_decode.cuh).
OW_WARP_KERNEL(ow_cascaded_decode, ow::decode_cascaded_item, ow::kCascadedShared, 12)

namespace {

template <int TR> OW_DEV void encode(ow_batch_item* item, ow::u32 shared) {
    ow::Encode<TR> e(item, shared, ow::warp_of_block(), blockDim.x / 32);
    OW_UNROLL(7)
    for (ow::u32 p = 0; p < ow::kEncodePhases; p++) {
        e.do_phase(p);
        __syncthreads();
    }
}

}  // namespace

// The X16 encoder (x16_encode.cuh): one block per item, in phases with a barrier after each.
// Shared memory: counts, tables and facts about the chunk, shared by all warps.
extern "C" __global__ void __launch_bounds__(OW_BATCH_MOST, 2) ow_x16_encode(ow_batch_item* items, uint32_t n) {
    using namespace ow;
    __shared__ __align__(16) u8 shared[kEncodeShared];
    if (blockIdx.x >= n) return;
    ow_batch_item* item = items + blockIdx.x;
    ow_batch_item it = *item;
    u32 bad = reason_not_to_encode(it), at = (u32)__cvta_generic_to_shared(shared);
    __syncthreads();
    if (bad) {
        if (threadIdx.x < 32) write_result(item, bad, 0);
        return;
    }
    switch (it.arg & 0xffff) {
        case OW_BF16: return encode<OW_BF16>(item, at);
        case OW_FP16: return encode<OW_FP16>(item, at);
        case OW_FP32: return encode<OW_FP32>(item, at);
        case OW_E4M3: return encode<OW_E4M3>(item, at);
        case OW_E5M2: return encode<OW_E5M2>(item, at);
        case OW_INT8: return encode<OW_INT8>(item, at);
        case OW_NIBBLES: return encode<OW_NIBBLES>(item, at);
        case OW_BYTES: return encode<OW_BYTES>(item, at);
    }
}

// Sums of XXH3-128 (hash.cuh): one block per item, of any number of warps. Eight lanes
// compute the sums of 1 KiB, one accumulator per lane. No shared memory.
extern "C" __global__ void __launch_bounds__(OW_BATCH_MOST) ow_hash_sums(ow_batch_item* items, uint32_t n) {
    if (blockIdx.x < n) ow::hash_share(items + blockIdx.x, ow::warp_of_block(), blockDim.x / 32);
}
