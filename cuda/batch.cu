// The batch kernels of abi_batch.h.
#include "cascaded_decode.cuh"
#include "lz4_decode.cuh"
#include "snappy_decode.cuh"
#include "x16_batch.cuh"
#include "x16_encode.cuh"

static_assert(sizeof(ow_batch_item) == 48, "abi_batch.h must have no padding");

// A warp an item; 12 blocks an SM leave 40 registers.
#ifndef OW_BATCH_BLOCKS
#define OW_BATCH_BLOCKS 12
#endif
#define OW_WARP_KERNEL(name, job_body, bytes)                                                       \
    extern "C" __global__ void __launch_bounds__(OW_BATCH_THREADS, OW_BATCH_BLOCKS)                  \
        name(ow_batch_item* items, uint32_t n) {                                                     \
        __shared__ __align__(1024) ow::u8 shared[bytes];                                             \
        uint32_t warp = ow::warp_of_block(), job = blockIdx.x * OW_BATCH_WARPS + warp;               \
        if (job < n) job_body(items, job, (uint32_t)__cvta_generic_to_shared(shared), warp);         \
    }

OW_WARP_KERNEL(ow_lz4_decode, ow::lz_job<ow::Lz4>, ow::kLzShared)
OW_WARP_KERNEL(ow_snappy_decode, ow::lz_job<ow::Snappy>, ow::kLzShared)
OW_WARP_KERNEL(ow_cascaded_decode, ow::cascaded_job, ow::kCascadedShared)

// A block an item, or as many as the grid is high.
extern "C" __global__ void __launch_bounds__(OW_BATCH_THREADS, 8) ow_x16_decode_batch(ow_batch_item* items, uint32_t n) {
    using namespace ow;
    __shared__ __align__(1024) u8 shared[OW_BATCH_WARPS * kX16Shared<X16Best>];
    if (blockIdx.x >= n) return;
    ow_batch_item* item = items + blockIdx.x;
    ow_batch_item it = *item;
    ow_x16_chunk c;
    bool good = x16_chunk(it, c) && x16_known(it.arg), first = blockIdx.y == 0 && threadIdx.x == 0;
    __syncthreads();
    if (first && !good) raise(&item->status, OW_BATCH_ARG);
    if (first) item->written = it.dst_cap;
    u32 warp = warp_of_block();
    X16Place place = x16_place<X16Best>((u32)__cvta_generic_to_shared(shared), warp, OW_BATCH_WARPS);
    if (good) x16_item_job(it, &item->status, place, blockIdx.y * OW_BATCH_WARPS + warp, gridDim.y * OW_BATCH_WARPS);
}

namespace {

template <int TR> OW_DEV void encode(ow_batch_item* item, ow::u32 shared) {
    typedef ow::Encode<TR> E;
    E e;
    E::open(e, item, shared, ow::warp_of_block(), blockDim.x / 32);
    OW_UNROLL(7)
    for (ow::u32 p = 0; p < ow::kEncodePhases; p++) {
        E::phase(e, p);
        __syncthreads();
    }
}

}  // namespace

// A block an item.
extern "C" __global__ void __launch_bounds__(OW_BATCH_MOST, 2) ow_x16_encode(ow_batch_item* items, uint32_t n) {
    using namespace ow;
    __shared__ __align__(16) u8 shared[kEncodeShared];
    if (blockIdx.x >= n) return;
    ow_batch_item* item = items + blockIdx.x;
    ow_batch_item it = *item;
    u32 bad = encode_refuses(it), at = (u32)__cvta_generic_to_shared(shared);
    __syncthreads();
    if (bad) {
        if (threadIdx.x < 32) batch_result(item, bad, 0);
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
