// The lab's reference decoder: docs/format.md 3.4 word for word, no table of
// slots, no lanes in parallel. Every read and write is checked.
#ifndef OVERWIRE_LAB_X16_REFERENCE_H
#define OVERWIRE_LAB_X16_REFERENCE_H

#include "x16_encode.h"

namespace lab {

// A palette byte beyond its field is cut, not refused.
inline uint32_t value_mask(int tr) {
    return tr == OW_FP16 || tr == OW_E5M2 ? 31 : layout(tr).identity ? 15 : 255;
}

// join is split's inverse: it writes element i.
inline void join(int tr, uint8_t* p, size_t i, uint32_t v, const uint32_t* r) {
    uint32_t e = 0;
    v &= value_mask(tr);
    switch (tr) {
        case OW_BF16: e = (r[0] & 1) << 15 | v << 7 | r[0] >> 1; break;
        case OW_FP16: e = r[0] | r[1] << 8 | r[2] << 9 | v << 10 | r[3] << 15; break;
        case OW_FP32: e = (r[0] & 1) << 31 | v << 23 | r[0] >> 1 << 16 | r[1] << 8 | r[2]; break;
        case OW_E4M3: e = r[0] >> 3 << 7 | v << 3 | (r[0] & 7); break;
        case OW_E5M2: e = r[0] | r[1] << 1 | v << 2 | r[2] << 7; break;
        case OW_INT8: e = v << 4 | r[0]; break;
        default: e = v; break;
    }
    int bits = layout(tr).elem_bits;
    if (bits == 4) p[i / 2] = (p[i / 2] & ~(15 << (4 * (i % 2)))) | e << (4 * (i % 2));
    else memcpy(p + i * bits / 8, &e, bits / 8);
}

// reference_decode fills dst[0..n) from one stored chunk; false: corrupt.
inline bool reference_decode(int tr, const Bytes& c, uint8_t* dst, size_t n, uint32_t seg_tiles) {
    const Layout& lay = layout(tr);
    if (c.size() < 96) return false;
    auto u32at = [&](size_t at) { uint32_t v; memcpy(&v, &c[at], 4); return v; };
    uint32_t T = n / tile_bytes(tr), G = (T + seg_tiles - 1) / seg_tiles;
    if (u32at(4) != T || c[0] > 1) return false;
    bool constant = c[0] == 1;
    const uint8_t *pal = &c[16], *freq = &c[32], *div = &c[48], *alias = &c[64];
    int bias[16];
    for (int b = 0; b < 16; b++) {
        int k = alias[b] & 15, given = div[k];
        for (int i = 0; i < b; i++) given += (alias[i] & 15) == k && div[i] < 16 ? 16 - div[i] : 0;
        bias[b] = given - div[b];
    }
    size_t planes = constant ? 96 : (96 + 8 * (G + 1) + 15) / 16 * 16;
    if (!constant && G) planes = 96 + 8 * (G + 1) <= c.size() ? u32at(96 + 8 * G) : c.size() + 1;
    if (planes > c.size() || planes % 16) return false;
    size_t plane_at[4] = {}, end = planes;
    int n_planes = 0;
    while (n_planes < 4 && lay.planes[n_planes]) n_planes++;
    if (c[2] >> n_planes || c[3] > (lay.identity || constant ? 0 : 16)) return false;
    for (int i = 0; i < n_planes; i++) {
        plane_at[i] = end;
        if (!(c[2] >> i & 1)) end += (size_t)T * plane_tile_bytes(lay.planes[i]);
    }
    size_t full = (size_t)T * tile_bytes(tr);
    if (c.size() != end + (n - full)) return false;
    auto planes_of = [&](size_t i, uint32_t* r) {
        for (int k = 0; k < 4 && lay.planes[k]; k++) {
            int bits = lay.planes[k];
            uint32_t mask = (1u << bits) - 1;
            r[k] = c[2] >> k & 1 ? c[8 + k] & mask : c[plane_at[k] + i * bits / 8] >> (i * bits % 8) & mask;
        }
    };
    uint32_t r[4];
    for (uint32_t g = 0; g < (constant ? 0 : G); g++) {
        uint32_t at = u32at(96 + 8 * g), esc = u32at(100 + 8 * g), stop = u32at(104 + 8 * g);
        if (at % 16 || stop % 16 || stop > planes || at + 128ull > stop || at < 96 + 8 * (G + 1)) return false;
        if (esc && !c[3]) return false;
        uint32_t x[32], t0 = g * seg_tiles, t1 = std::min(T, t0 + seg_tiles);
        memcpy(x, &c[at], 128);
        size_t w = at + 128;
        for (uint32_t tile = t0; tile < t1; tile++) {
            for (int step = 0; step < 8; step++) {
                for (int l = 0; l < 32; l++) {
                    uint32_t s = x[l] & 255, b = s / 16, q = s % 16;
                    uint32_t k = q < div[b] ? b : alias[b] & 15, rank = q < div[b] ? q : q + bias[b];
                    x[l] = freq[k] * (x[l] >> 8) + (rank & 255);
                    size_t i = 256ull * tile + lane_first(l) + step;
                    planes_of(i, r);
                    join(tr, dst, i, pal[k], r);
                }
                if (step % 2 == 0) continue;
                for (uint32_t& s : x) {
                    if (s >= 1 << 16) continue;
                    if (w + 2 > stop) return false;
                    s = s << 16 | c[w] | c[w + 1] << 8;
                    w += 2;
                }
            }
        }
        for (uint32_t s : x) {
            if (s != 1 << 16) return false;
        }
        if (esc > 65536 || (w + 3ull * esc + 15) / 16 * 16 != stop) return false;
        for (uint32_t i = 0, last = 0; i < esc; i++) {
            uint32_t pos = c[w + 2 * i] | c[w + 2 * i + 1] << 8;
            if (pos >= 256 * (t1 - t0) || (i && pos <= last)) return false;
            last = pos;
            planes_of(256ull * t0 + pos, r);
            join(tr, dst, 256ull * t0 + pos, c[w + 2 * esc + i], r);
        }
    }
    for (size_t i = 0; constant && i < 256ull * T; i++) {
        planes_of(i, r);
        join(tr, dst, i, pal[c[1] & 15], r);
    }
    memcpy(dst + full, &c[end], n - full);
    return true;
}

}  // namespace lab
#endif
