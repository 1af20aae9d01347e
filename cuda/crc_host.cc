// Host twin of the kernel in crc.cu, on the warp of warp_host.h.
#include "crc.cuh"

extern "C" void ow_crc_host(const ow_crc_part* parts, uint32_t* sums, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        ow::run_warp([&] { ow::sum_crc_part(parts, sums, i, 0); }, i & 1);
    }
}
