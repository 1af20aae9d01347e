// Host twins of the kernels in resident.cu, on the warp of warp_host.h.
#include "delta.cuh"
#include "digest.cuh"

extern "C" void ow_digest_host(const ow_digest_job* jobs, uint32_t n, uint64_t tiles, const ow_digest_dim* dims, uint64_t* sums,
                               uint32_t warps) {
    for (uint32_t warp_id = 0; warp_id < warps; warp_id++) {
        ow::run_warp([&] { ow::digest_share<false>(jobs, n, tiles, dims, (ow::u64*)sums, warp_id, warps); }, warp_id % 2);
    }
}

extern "C" void ow_digest_keyed_host(const ow_digest_job* jobs, uint32_t n, uint64_t tiles, const ow_digest_dim* dims, uint64_t* sums,
                                     uint32_t warps) {
    for (uint32_t warp_id = 0; warp_id < warps; warp_id++) {
        ow::run_warp([&] { ow::digest_share<true>(jobs, n, tiles, dims, (ow::u64*)sums, warp_id, warps); }, warp_id % 2);
    }
}

extern "C" void ow_delta_apply_host(const ow_delta_row* rows, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) ow::run_warp([&] { ow::delta_apply(rows, i, 0); }, i % 2);
}

extern "C" void ow_delta_measure_host(ow_delta_row* rows, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) ow::run_warp([&] { ow::delta_measure(rows, i, 0); }, i % 2);
}

extern "C" void ow_delta_write_host(const ow_delta_row* rows, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) ow::run_warp([&] { ow::delta_write(rows, i, 0); }, i % 2);
}
