// The batch kernels of abi_batch.h.
#include "lz4_decode.cuh"
#include "snappy_decode.cuh"

static_assert(sizeof(ow_batch_item) == 48, "abi_batch.h must have no padding");

// A warp an item; 12 blocks an SM leave 40 registers.
#ifndef OW_BATCH_BLOCKS
#define OW_BATCH_BLOCKS 12
#endif
#define OW_WARP_KERNEL(name, job_body, bytes)                                                          \
    extern "C" __global__ void __launch_bounds__(OW_BATCH_THREADS, OW_BATCH_BLOCKS) \
        name(ow_batch_item* items, uint32_t n) { \
        __shared__ __align__(bytes) ow::u8 shared[OW_BATCH_WARPS * (bytes)];                           \
        uint32_t warp = threadIdx.x / 32, job = blockIdx.x * OW_BATCH_WARPS + warp;                    \
        if (job < n) job_body(items, job, (uint32_t)__cvta_generic_to_shared(shared) + warp * (bytes)); \
    }

OW_WARP_KERNEL(ow_lz4_decode, ow::lz4_job, ow::kFeedRing)
OW_WARP_KERNEL(ow_snappy_decode, ow::snappy_job, ow::kFeedRing)
