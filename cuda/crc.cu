// The kernel of crc.cuh. Launch: block 32 * OW_X16_WARPS, grid ceil(n / OW_X16_WARPS).
// Arguments: parts, one result word per part, number of parts, status words (unused).
#include "abi.h"
#include "crc.cuh"

static_assert(sizeof(ow_crc_part) == 16, "abi_crc.h must have no padding");

extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS) ow_crc(const ow_crc_part* parts, uint32_t* sums, uint32_t n, uint32_t*) {
    __shared__ __align__(16) uint8_t shared[OW_X16_WARPS * ow::kCrcShared];
    uint32_t warp_id = ow::warp_of_block(), i = blockIdx.x * OW_X16_WARPS + warp_id;
    if (i < n) ow::sum_crc_part(parts, sums, i, (uint32_t)__cvta_generic_to_shared(shared) + warp_id * ow::kCrcShared);
}
