// The X16 kernels: one entry for each transform, ow_x16_<name>.
//
// A warp decodes a segment (x16_decode.cuh). Warps of a block share nothing: a block has
// several of them so that its tables and rings fill the shared memory of an SM. A kernel
// for each transform, since the transform decides how many registers a lane needs, and with
// them how many warps an SM has in flight to hide the latency of loads.
//
// Launch: block 32 * OW_X16_WARPS, grid ceil(n / OW_X16_WARPS), dynamic shared
// memory OW_X16_SHARED. Arguments: chunks, segment jobs, their number, status
// words. All pointers are device addresses.
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

// `blocks` an SM: 6 leave 40 registers a thread, 5 leave 48.
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
