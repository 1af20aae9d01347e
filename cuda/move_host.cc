// Host twins of the kernels in move.cu, on the warp of warp_host.h.
#include "move.cuh"

extern "C" void ow_move_host(const ow_move* moves, const ow_part* parts, uint32_t n) {
    for (uint32_t job = 0; job < n; job++) {
        ow::run_warp([&] { ow::move_part(moves, parts, job); });
    }
}

extern "C" void ow_cast_host(const ow_cast* casts, const ow_part* parts, uint32_t n) {
    for (uint32_t job = 0; job < n; job++) {
        ow::run_warp([&] { ow::cast_part(casts, parts, job); });
    }
}
