// The kernels of stream.cuh and stream_make.cuh. Launch: block 32 * OW_X16_WARPS, and enough
// blocks for n threads or n warps. Only ow_stream_x16 uses shared memory.
#include "stream.cuh"
#include "stream_make.cuh"

static_assert(sizeof(ow_stream) == 64 && sizeof(ow_stream_head) == 32 && sizeof(ow_stream_peek_t) == 24 && sizeof(ow_stream_few) == 1056,
              "abi_stream.h must have no padding");

// One thread per row. Compares the row's stream with the host's expectations, finds the row's
// block in the stream, and fills the row's item for a decoder of abi_batch.h.
extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS)
    ow_stream_open(const ow_stream_head* head, ow_batch_item* rows, uint32_t n, uint32_t* status) {
    uint32_t row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < n) ow::fill_row_to_decode(head, rows, row, status);
}

// One thread per row, after the decoder. If a row was not decoded completely, sets an error
// bit of its stream.
extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS)
    ow_stream_close(const ow_stream_head* head, const ow_batch_item* rows, uint32_t n, uint32_t* status) {
    uint32_t row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < n) ow::check_decoded_row(head, rows, row, status);
}

// One thread per stream. Reads the content size, for hosts that do not know it.
extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS)
    ow_stream_peek(const ow_stream_head* head, ow_stream_peek_t* out, uint32_t n, uint32_t*) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) ow::peek_stream(head, out, i);
}

// One warp per share of a row; a share is every split-th segment of the row's chunk. Parses,
// checks and decodes in one launch. Launch as the kernels of x16_decode.cu, but with
// OW_STREAM_SHARED bytes of shared memory: tables, rings, and 32 bytes per warp for its chunk.
// If head is null, the batch is `few`.
extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS, 4)
    ow_stream_x16(const ow_stream_head* head, const void*, uint32_t n, uint32_t* status, const __grid_constant__ ow_stream_few few) {
    extern __shared__ __align__(1024) ow::u32 shared[];
    uint32_t warp_id = ow::warp_of_block(), job = blockIdx.x * OW_X16_WARPS + warp_id, base = (uint32_t)__cvta_generic_to_shared(shared);
    if (job >= n) return;
    ow::X16Place place = ow::x16_shared_memory(base, warp_id, OW_X16_WARPS);
    ow::decode_share(head ? head : &few.head, job, status, place, base + OW_X16_SHARED + 32 * warp_id);
}

// One thread per row. Fills the row's item for ow_x16_encode: a chunk of content and the space
// for its block.
extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS)
    ow_stream_cut(const ow_stream_head* head, ow_batch_item* rows, uint32_t n, uint32_t*) {
    uint32_t row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < n) ow::fill_row_to_encode(head, rows, row);
}

// One warp per stream, after the encoder. Computes the offsets of 32 rows at a time by prefix
// sums of their lengths, and writes the stream's tables and header.
extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS)
    ow_stream_sum(const ow_stream_head* head, ow_batch_item* rows, uint32_t n, uint32_t* status) {
    uint32_t i = blockIdx.x * OW_X16_WARPS + threadIdx.x / 32;
    if (i < n) ow::lay_out_stream(head, rows, i, status);
}

// One warp per share of a row. Copies its share of the row's block to the row's offset.
extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS)
    ow_stream_join(const ow_stream_head* head, const ow_batch_item* rows, uint32_t n, uint32_t* status) {
    uint32_t job = blockIdx.x * OW_X16_WARPS + threadIdx.x / 32;
    if (job < n) ow::write_row_share(head, rows, job, status);
}
