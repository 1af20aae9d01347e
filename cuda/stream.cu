// The kernels of stream.cuh and stream_make.cuh. Launch: blocks of 32 * OW_X16_WARPS, as
// many as n threads or warps need; no shared memory but ow_stream_x16's.
#include "stream.cuh"
#include "stream_make.cuh"

static_assert(sizeof(ow_stream) == 64 && sizeof(ow_stream_head) == 32 && sizeof(ow_stream_peek_t) == 24 && sizeof(ow_stream_few) == 1056,
              "abi_stream.h must have no padding");

// A thread a row: compares the row's stream with what the host expects, finds the row's
// block in it, and fills the item that a decoder of abi_batch.h takes.
extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS)
    ow_stream_open(const ow_stream_head* head, ow_batch_item* rows, uint32_t n, uint32_t* status) {
    uint32_t row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < n) ow::fill_row_to_decode(head, rows, row, status);
}

// A thread a row, behind the decoder: a row that was not decoded completely is an error of
// its stream.
extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS)
    ow_stream_close(const ow_stream_head* head, const ow_batch_item* rows, uint32_t n, uint32_t* status) {
    uint32_t row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < n) ow::check_decoded_row(head, rows, row, status);
}

// A thread a stream: how long its content is, for a host that does not know it.
extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS)
    ow_stream_peek(const ow_stream_head* head, ow_stream_peek_t* out, uint32_t n, uint32_t*) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) ow::peek_stream(head, out, i);
}

// A warp a share of a row, which is every split-th segment of its chunk: opens, checks and
// decodes in one launch. Launched as the kernels of x16_decode.cu, with OW_STREAM_SHARED: their
// tables and rings, then 32 bytes of each warp for its chunk. Without a head it takes that of
// `few`.
extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS, 4)
    ow_stream_x16(const ow_stream_head* head, const void*, uint32_t n, uint32_t* status, const __grid_constant__ ow_stream_few few) {
    extern __shared__ __align__(1024) ow::u32 shared[];
    uint32_t warp_id = ow::warp_of_block(), job = blockIdx.x * OW_X16_WARPS + warp_id, base = (uint32_t)__cvta_generic_to_shared(shared);
    if (job >= n) return;
    ow::X16Place place = ow::x16_shared_memory(base, warp_id, OW_X16_WARPS);
    ow::decode_share(head ? head : &few.head, job, status, place, base + OW_X16_SHARED + 32 * warp_id);
}

// A thread a row: the chunk of content that ow_x16_encode is to code, and the space for its
// block.
extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS)
    ow_stream_cut(const ow_stream_head* head, ow_batch_item* rows, uint32_t n, uint32_t*) {
    uint32_t row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < n) ow::fill_row_to_encode(head, rows, row);
}

// A warp a stream, behind the encoder: 32 rows at a time, prefix sums of their lengths give
// each row its offset, then come the tables and the header.
extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS)
    ow_stream_sum(const ow_stream_head* head, ow_batch_item* rows, uint32_t n, uint32_t* status) {
    uint32_t i = blockIdx.x * OW_X16_WARPS + threadIdx.x / 32;
    if (i < n) ow::lay_out_stream(head, rows, i, status);
}

// A warp a share of a row: copies the row's block to its offset.
extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS)
    ow_stream_join(const ow_stream_head* head, const ow_batch_item* rows, uint32_t n, uint32_t* status) {
    uint32_t job = blockIdx.x * OW_X16_WARPS + threadIdx.x / 32;
    if (job < n) ow::write_row_share(head, rows, job, status);
}
