// The kernels of stream.cuh and stream_make.cuh. ow_stream_open, _close, _cut and
// _peek: one thread per row or stream; ow_stream_sum one warp per stream,
// ow_stream_join one warp per share of a row; blocks of 32 * OW_X16_WARPS.
// ow_stream_x16: one warp per share of a row, launched as the kernels of
// x16_decode.cu, with OW_STREAM_SHARED; without a head it takes that of `few`.
#include "stream.cuh"
#include "stream_make.cuh"

static_assert(sizeof(ow_stream) == 64 && sizeof(ow_stream_head) == 32 && sizeof(ow_stream_peek_t) == 24 && sizeof(ow_stream_few) == 1056,
              "abi_stream.h must have no padding");

extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS)
    ow_stream_open(const ow_stream_head* head, ow_batch_item* rows, uint32_t n, uint32_t* status) {
    uint32_t row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < n) ow::stream_open(head, rows, row, status);
}

extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS)
    ow_stream_close(const ow_stream_head* head, const ow_batch_item* rows, uint32_t n, uint32_t* status) {
    uint32_t row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < n) ow::stream_close(head, rows, row, status);
}

extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS)
    ow_stream_peek(const ow_stream_head* head, ow_stream_peek_t* out, uint32_t n, uint32_t*) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) ow::stream_peek(head, out, i);
}

extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS, 4)
    ow_stream_x16(const ow_stream_head* head, const void*, uint32_t n, uint32_t* status, const __grid_constant__ ow_stream_few few) {
    extern __shared__ __align__(1024) ow::u32 shared[];
    uint32_t warp_id = ow::warp_of_block(), job = blockIdx.x * OW_X16_WARPS + warp_id, base = (uint32_t)__cvta_generic_to_shared(shared);
    if (job >= n) return;
    ow::X16Place place = ow::x16_place(base, warp_id, OW_X16_WARPS);
    ow::stream_x16(head ? head : &few.head, job, status, place, base + OW_X16_SHARED + 32 * warp_id);
}

extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS)
    ow_stream_cut(const ow_stream_head* head, ow_batch_item* rows, uint32_t n, uint32_t*) {
    uint32_t row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < n) ow::stream_cut(head, rows, row);
}

extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS)
    ow_stream_sum(const ow_stream_head* head, ow_batch_item* rows, uint32_t n, uint32_t* status) {
    uint32_t i = blockIdx.x * OW_X16_WARPS + threadIdx.x / 32;
    if (i < n) ow::stream_sum(head, rows, i, status);
}

extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS)
    ow_stream_join(const ow_stream_head* head, const ow_batch_item* rows, uint32_t n, uint32_t* status) {
    uint32_t job = blockIdx.x * OW_X16_WARPS + threadIdx.x / 32;
    if (job < n) ow::stream_join(head, rows, job, status);
}
