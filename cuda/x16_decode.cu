// The X16 decoding kernels, one for each transform: ow_x16_<name>.
//
// Each warp decodes one segment (x16_decode.cuh). The warps of a block share no data. A block
// has several warps so that the tables and rings of all blocks fill the shared memory of an SM.
// Each transform has its own kernel because transforms need different numbers of registers.
// Fewer registers allow more resident warps per SM, which hide the latency of loads.
//
// Launch: block 32 * OW_X16_WARPS, grid ceil(n / OW_X16_WARPS), OW_X16_SHARED bytes of
// dynamic shared memory. Arguments: chunks, segment jobs, number of jobs, status words. All
// pointers are device addresses.
#include "x16_decode.cuh"

namespace {

using namespace ow;

static_assert(sizeof(ow_x16_chunk) == 32 && sizeof(ow_x16_seg) == 8, "abi.h must have no padding");
static_assert(OW_X16_SHARED == OW_X16_WARPS * kX16Shared, "abi.h must know the shared size");

template <int TR>
OW_DEV void decode(const ow_x16_chunk* chunks, const ow_x16_seg* segs, u32 n, u32* status) {
    extern __shared__ __align__(1024) u32 shared[];
    u32 warp_id = threadIdx.x / 32, job = blockIdx.x * OW_X16_WARPS + warp_id;
    if (job >= n) return;
    X16Place place = x16_shared_memory((u32)__cvta_generic_to_shared(shared), warp_id, OW_X16_WARPS);
    x16_decode_listed<TR>(chunks, segs, job, status, place);
}

}  // namespace

// `blocks` is per SM: 6 blocks allow 40 registers per thread, 5 allow 48.
#define OW_X16_KERNEL(name, transform, blocks)                                                                \
    extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS, blocks)                                   \
        ow_x16_##name(const ow_x16_chunk* chunks, const ow_x16_seg* segs, uint32_t n, uint32_t* status) {     \
        decode<transform>(chunks, segs, n, status);                                                           \
    }

OW_X16_KERNEL(bf16, OW_BF16, 6)
OW_X16_KERNEL(fp16, OW_FP16, 5)
OW_X16_KERNEL(fp32, OW_FP32, 5)
OW_X16_KERNEL(e4m3, OW_E4M3, 6)
OW_X16_KERNEL(e5m2, OW_E5M2, 6)
OW_X16_KERNEL(int8, OW_INT8, 6)
OW_X16_KERNEL(nibbles, OW_NIBBLES, 6)
OW_X16_KERNEL(bytes, OW_BYTES, 6)
