// Host twins of the kernels in stream.cu, on the warp of warp_host.h.
#include "stream.cuh"
#include "stream_make.cuh"

extern "C" void ow_stream_open_host(const ow_stream_head* head, ow_batch_item* rows, uint32_t n, uint32_t* status) {
    for (uint32_t row = 0; row < n; row++) ow::fill_row_to_decode(head, rows, row, status);
}

extern "C" void ow_stream_close_host(const ow_stream_head* head, const ow_batch_item* rows, uint32_t n, uint32_t* status) {
    for (uint32_t row = 0; row < n; row++) ow::check_decoded_row(head, rows, row, status);
}

extern "C" void ow_stream_peek_host(const ow_stream_head* head, ow_stream_peek_t* out, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) ow::peek_stream(head, out, i);
}

extern "C" void ow_stream_x16_host(const ow_stream_head* head, uint32_t n, uint32_t* status) {
    for (uint32_t job = 0; job < n; job++) {
        uint32_t warp_id = job % OW_X16_WARPS;
        ow::run_warp([&] {
            ow::X16Place place = ow::x16_shared_memory(0, warp_id, OW_X16_WARPS);
            ow::decode_share(head, job, status, place, OW_X16_SHARED + 32 * warp_id);
        }, job & 1);
    }
}

extern "C" void ow_stream_cut_host(const ow_stream_head* head, ow_batch_item* rows, uint32_t n) {
    for (uint32_t row = 0; row < n; row++) ow::fill_row_to_encode(head, rows, row);
}

extern "C" void ow_stream_sum_host(const ow_stream_head* head, ow_batch_item* rows, uint32_t n, uint32_t* status) {
    for (uint32_t i = 0; i < n; i++) ow::run_warp([&] { ow::lay_out_stream(head, rows, i, status); }, i & 1);
}

extern "C" void ow_stream_join_host(const ow_stream_head* head, const ow_batch_item* rows, uint32_t n, uint32_t* status) {
    for (uint32_t job = 0; job < n; job++) ow::run_warp([&] { ow::write_row_share(head, rows, job, status); }, job & 1);
}
