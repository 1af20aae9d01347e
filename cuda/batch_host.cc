// The host twins of batch.cu, run by the warp of warp_host.h.
#include "lz4_decode.cuh"
#include "snappy_decode.cuh"

namespace {

template <class F> void each(ow_batch_item* items, uint32_t n, F job, uint32_t shared) {
    for (uint32_t i = 0; i < n; i++) {
        // Every other item with its lanes in falling order, and in another warp's
        // place in shared memory.
        ow::run_warp([&] { job(items, i, i % OW_BATCH_WARPS * shared); }, i & 1);
    }
}

}  // namespace

extern "C" void ow_lz4_decode_host(ow_batch_item* items, uint32_t n) {
    each(items, n, [](ow_batch_item* p, uint32_t i, uint32_t s) { ow::lz4_job(p, i, s); }, ow::kFeedRing);
}

extern "C" void ow_snappy_decode_host(ow_batch_item* items, uint32_t n) {
    each(items, n, [](ow_batch_item* p, uint32_t i, uint32_t s) { ow::snappy_job(p, i, s); }, ow::kFeedRing);
}
