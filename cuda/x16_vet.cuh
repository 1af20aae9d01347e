// Checks X16 chunks that the host has not seen. It accepts exactly what Check of
// the Go decoder accepts (gosrc/codec/x16/check.go).
#ifndef OVERWIRE_X16_VET_CUH
#define OVERWIRE_X16_VET_CUH

#include "x16_decode.cuh"

namespace ow {

// The properties of a transform that x16_vet uses: bytes per tile, number of symbol
// values, whether it has escapes, number of planes, and plane widths, four bits each.
struct X16Form { u32 tile, values; bool escapes; u32 planes, widths; };

template <int TR> OW_DEV X16Form x16_form() {
    typedef Transform<TR> X;
    X16Form f = {32 * X::kOut, TR == OW_FP16 || TR == OW_E5M2 ? 32 : X::kEscapes ? 256 : 16, X::kEscapes, X::kPlanes, 0};
    for (int i = 0; i < X::kPlanes; i++) f.widths |= X::plane_bits(i) << 4 * i;
    return f;
}

// x16_vet checks header, table and directory. Returns 0 or status bits, the same in all
// lanes. x16_open_segment checks the rest.
OW_COLD u32 x16_vet(const ow_x16_chunk& c, X16Form form) {
    if (c.stored < kX16Header || c.tiles == 0 || c.tiles > 256) return OW_X16_LAYOUT;
    const u8* src = (const u8*)(uintptr_t)c.src;
    u32 total = c.logical / form.tile, mode = ldg8(src), symbol = ldg8(src + 1), escape = ldg8(src + 3) - 1;
    if (total == 0 || mode > 1 || symbol > 15 || (mode == 0 && symbol)) return OW_X16_LAYOUT;
    // Lanes k and k + 16 check symbol and bucket k, and if k < 8 the constant of plane k.
    u32 k = lane_id() & 15, v = ldg8(src + 16 + k), f = ldg8(src + 32 + k), d = ldg8(src + 48 + k), a = ldg8(src + 64 + k);
    bool bad = ldg8(src + 80 + k) != 0 || (mode && (f | d | a)) || a > 15;
    if (k < 8) {
        u32 constant = ldg8(src + 2) >> k & 1, limit = 0;
        if (constant && k < form.planes) limit = (1u << (form.widths >> 4 * k & 15)) - 1;
        bad = bad || ldg8(src + 8 + k) > limit;
    }
    if (!form.escapes) {
        bad = bad || v != k || escape != ~0u;
    } else {
        bool has = k != escape && (f > 0 || (mode && k == symbol));
        bad = bad || v >= (has ? form.values : 1) || (k == escape && (mode || f == 0));
    }
    if (!mode) {
        bad = bad || d > 16 || (d == 16) != (a == k);
        u32 slots = umin(d, 16), sum = 0;
        OW_UNROLL(1)
        for (u32 i = 0; i < 16; i++) {
            u32 alias = shfl(a, i), rest = 16 - umin(shfl(d, i), 16);
            if (alias == k) slots += rest;
            sum += shfl(f, i);
        }
        bad = bad || slots != f || sum != 256;
    }
    if (ballot(bad)) return OW_X16_LAYOUT;
    if (mode) return 0;
    u32 segs = (total + c.tiles - 1) / c.tiles, first = (kX16Header + 8 * (segs + 1) + 15) / 16 * 16;
    if (first > c.stored) return OW_X16_LAYOUT;
    const u8* dir = src + kX16Header;
    bad = ldg32(dir) != first || ldg32(dir + 8 * segs + 4) != 0;
    OW_UNROLL(1)
    for (u32 at = kX16Header + 8 * (segs + 1) + lane_id(); at < first; at += 32) bad = bad || ldg8(src + at);
    OW_UNROLL(1)
    for (u32 s = lane_id(); s < segs; s += 32) {
        u32x2 here = ldg64(dir + 8 * s), next = ldg64(dir + 8 * s + 8);
        u32 tiles = umin(c.tiles, total - s * c.tiles);
        bad = bad || here.y > 256 * tiles || next.x > c.stored || here.x > next.x || next.x - here.x < 128 + 3 * here.y;
    }
    return ballot(bad) ? OW_X16_LAYOUT : 0;
}

}  // namespace ow
#endif
