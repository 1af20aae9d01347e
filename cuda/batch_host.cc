// Host twins of the kernels in batch.cu, on the warp of warp_host.h.
#include "cascaded_decode.cuh"
#include "hash.cuh"
#include "lz4_decode.cuh"
#include "snappy_decode.cuh"
#include "x16_encode.cuh"

namespace {

template <class F> void run_items(ow_batch_item* items, uint32_t n, F job) {
    for (uint32_t i = 0; i < n; i++) {
        // Every other item runs its lanes in falling order, and the warp's position in a block varies.
        ow::run_warp([&] { job(items, i, 1024, i % OW_BATCH_WARPS); }, i & 1);
    }
}

template <int TR> void encode(ow_batch_item* item, bool falling) {
    uint32_t warps = ow_x16_threads(item->src_len) / 32 << falling;
    for (uint32_t p = 0; p < ow::kEncodePhases; p++) {
        for (uint32_t i = 0; i < warps; i++) {
            uint32_t warp_id = falling ? warps - 1 - i : i;
            ow::run_phase([&] {
                ow::Encode<TR> e(item, 1040, warp_id, warps);  // an offset that is aligned only to 16
                e.do_phase(p);
            }, p == 0 && i == 0, falling);
        }
    }
}

}  // namespace

extern "C" void ow_lz4_decode_host(ow_batch_item* items, uint32_t n) {
    run_items(items, n, [](ow_batch_item* p, uint32_t i, uint32_t base, uint32_t warp_id) { ow::decode_lz_item<ow::Lz4>(p, i, base, warp_id); });
}

extern "C" void ow_snappy_decode_host(ow_batch_item* items, uint32_t n) {
    run_items(items, n, [](ow_batch_item* p, uint32_t i, uint32_t base, uint32_t warp_id) { ow::decode_lz_item<ow::Snappy>(p, i, base, warp_id); });
}

extern "C" void ow_cascaded_decode_host(ow_batch_item* items, uint32_t n) {
    run_items(items, n, [](ow_batch_item* p, uint32_t i, uint32_t base, uint32_t warp_id) { ow::decode_cascaded_item(p, i, base, warp_id); });
}

extern "C" void ow_x16_encode_host(ow_batch_item* items, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        ow_batch_item* p = items + i;
        if (uint32_t bad = ow::reason_not_to_encode(*p)) {
            p->written = 0;
            p->status = bad;
            continue;
        }
        switch (p->arg & 0xffff) {
            case OW_BF16: encode<OW_BF16>(p, i & 1); break;
            case OW_FP16: encode<OW_FP16>(p, i & 1); break;
            case OW_FP32: encode<OW_FP32>(p, i & 1); break;
            case OW_E4M3: encode<OW_E4M3>(p, i & 1); break;
            case OW_E5M2: encode<OW_E5M2>(p, i & 1); break;
            case OW_INT8: encode<OW_INT8>(p, i & 1); break;
            case OW_NIBBLES: encode<OW_NIBBLES>(p, i & 1); break;
            case OW_BYTES: encode<OW_BYTES>(p, i & 1); break;
        }
    }
}

extern "C" void ow_hash_sums_host(ow_batch_item* items, uint32_t n) {
    constexpr uint32_t warps = 3;
    for (uint32_t i = 0; i < n * warps; i++) {
        ow::run_warp([&] { ow::hash_share(items + i / warps, i % warps, warps); }, i & 1);
    }
}
