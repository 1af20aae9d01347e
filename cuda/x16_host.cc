// Host twin of the kernels in x16_decode.cu: the same bodies on the warp of warp_host.h.
// The fake driver calls it on machines without a GPU, and tests compare it with the Go
// decoder. It is only for tests, because it decodes only about 10 MB/s.
#include "x16_decode.cuh"

namespace {

template <int TR>
void run_segments(const ow_x16_chunk* chunks, const ow_x16_seg* segs, uint32_t n, uint32_t* status) {
    for (uint32_t job = 0; job < n; job++) {
        ow::run_warp([&] {
            ow::X16Place place = ow::x16_shared_memory(0, job % OW_X16_WARPS, OW_X16_WARPS);
            ow::x16_decode_listed<TR>(chunks, segs, job, status, place);
        });
    }
}

}  // namespace

// ow_x16_host decodes n segment jobs on the calling thread. The chunks contain host
// addresses. Returns 0, or -1 for an unknown transform.
extern "C" int ow_x16_host(int transform, const ow_x16_chunk* chunks, const ow_x16_seg* segs, uint32_t n, uint32_t* status) {
    switch (transform) {
        case OW_BF16: run_segments<OW_BF16>(chunks, segs, n, status); return 0;
        case OW_FP16: run_segments<OW_FP16>(chunks, segs, n, status); return 0;
        case OW_FP32: run_segments<OW_FP32>(chunks, segs, n, status); return 0;
        case OW_E4M3: run_segments<OW_E4M3>(chunks, segs, n, status); return 0;
        case OW_E5M2: run_segments<OW_E5M2>(chunks, segs, n, status); return 0;
        case OW_INT8: run_segments<OW_INT8>(chunks, segs, n, status); return 0;
        case OW_NIBBLES: run_segments<OW_NIBBLES>(chunks, segs, n, status); return 0;
        case OW_BYTES: run_segments<OW_BYTES>(chunks, segs, n, status); return 0;
    }
    return -1;
}
