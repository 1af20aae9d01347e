// The kernels of move.cuh. Launch: block 32 * OW_X16_WARPS, grid ceil(n / OW_X16_WARPS),
// no shared memory. Arguments: jobs, parts, number of parts, status words (unused).
#include "abi.h"
#include "move.cuh"

static_assert(sizeof(ow_move) == 40 && sizeof(ow_cast) == 32 && sizeof(ow_part) == 8, "abi_move.h must have no padding");

// One warp per part of a move: 16 KiB of a long row, or several short rows. Each lane copies
// aligned 16-byte units of the destination.
extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS)
    ow_move_kernel(const ow_move* moves, const ow_part* parts, uint32_t n, uint32_t*) {
    uint32_t job = blockIdx.x * OW_X16_WARPS + threadIdx.x / 32;
    if (job < n) ow::move_part(moves, parts, job);
}

// One warp per part of a cast. Each lane converts one element at a time, through float32.
extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS)
    ow_cast_kernel(const ow_cast* casts, const ow_part* parts, uint32_t n, uint32_t*) {
    uint32_t job = blockIdx.x * OW_X16_WARPS + threadIdx.x / 32;
    if (job < n) ow::cast_part(casts, parts, job);
}
