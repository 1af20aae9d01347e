// The lab's own encoder of docs/format.md 3: scalar, plain and exact. It shares
// no code with the product's encoder, so that agreement means something.
#ifndef OVERWIRE_LAB_X16_ENCODE_H
#define OVERWIRE_LAB_X16_ENCODE_H

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "../abi.h"

namespace lab {

typedef std::vector<uint8_t> Bytes;

// Planes of a transform: bits each, 0 ends the list.
struct Layout {
    int elem_bits;   // of one symbol's element
    int planes[4];
    bool identity;
    const char* name;
};
inline const Layout& layout(int tr) {
    static const Layout l[] = {{0, {}, false, "none"},          {16, {8}, false, "bf16"},
                               {16, {8, 1, 1, 1}, false, "fp16"}, {32, {8, 8, 8}, false, "fp32"},
                               {8, {4}, true, "e4m3"},          {8, {1, 1, 1}, false, "e5m2"},
                               {8, {4}, true, "int8"},          {4, {}, true, "nibbles"},
                               {8, {}, false, "bytes"}};
    return l[tr];
}
inline uint32_t tile_bytes(int tr) { return 32 * layout(tr).elem_bits; }
inline uint32_t plane_tile_bytes(int bits) { return 32 * bits; }

// Element i of p, split into symbol value and plane values.
struct Parts { uint32_t value, plane[4]; };
inline Parts split(int tr, const uint8_t* p, size_t i) {
    uint32_t e = 0;
    switch (layout(tr).elem_bits) {
        case 4: e = p[i / 2] >> (4 * (i % 2)) & 15; break;
        case 8: e = p[i]; break;
        case 16: e = p[2 * i] | p[2 * i + 1] << 8; break;
        default: memcpy(&e, p + 4 * i, 4);
    }
    switch (tr) {
        case OW_BF16: return {e >> 7 & 255, {(e & 127) << 1 | e >> 15}};
        case OW_FP16: return {e >> 10 & 31, {e & 255, e >> 8 & 1, e >> 9 & 1, e >> 15}};
        case OW_FP32: return {e >> 23 & 255, {(e >> 16 & 127) << 1 | e >> 31, e >> 8 & 255, e & 255}};
        case OW_E4M3: return {e >> 3 & 15, {e >> 7 << 3 | (e & 7)}};
        case OW_E5M2: return {e >> 2 & 31, {e & 1, e >> 1 & 1, e >> 7}};
        case OW_INT8: return {e >> 4, {e & 15}};
        default: return {e, {}};
    }
}

// The place in a tile of lane l's first symbol.
inline uint32_t lane_first(uint32_t l) { return 128 * (l / 16) + 8 * (4 * (l % 4) + l % 16 / 4); }

struct Table {
    uint8_t palette[16], freq[16], divider[16], alias[16];
    int escape;                 // symbol, or -1
    uint16_t slot[16][256];     // symbol, rank -> slot
    int symbol_of[256];         // value -> symbol, -1: escape
};

inline void build_table(Table& t, const uint64_t* count, bool identity) {
    memset(&t, 0, sizeof t);
    t.escape = -1;
    std::vector<int> order;
    for (int v = 0; v < 256; v++) {
        t.symbol_of[v] = -1;
        if (count[v]) order.push_back(v);
    }
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return count[a] > count[b]; });
    uint64_t n[16] = {}, total = 0;
    if (identity) {
        for (int k = 0; k < 16; k++) n[k] = count[k], t.palette[k] = k, t.symbol_of[k] = k;
    } else {
        int direct = order.size() <= 16 ? (int)order.size() : 15;
        for (int k = 0; k < direct; k++) n[k] = count[order[k]], t.palette[k] = order[k], t.symbol_of[order[k]] = k;
        if (order.size() > 16) {
            t.escape = 15;
            for (size_t i = 15; i < order.size(); i++) n[15] += count[order[i]];
        }
    }
    for (uint64_t c : n) total += c;
    // Frequencies of sum 256, none of a used symbol below 1 or above 255.
    int f[16], sum = 0;
    for (int k = 0; k < 16; k++) {
        f[k] = n[k] ? std::min(255, std::max(1, (int)std::lround(256.0 * n[k] / total))) : 0;
        sum += f[k];
    }
    while (sum != 256) {
        int best = -1, step = sum > 256 ? -1 : 1;
        double cost = 1e300;
        for (int k = 0; k < 16; k++) {
            if (!n[k] || f[k] + step < 1 || f[k] + step > 255) continue;
            double c = n[k] * std::log((double)f[k] / (f[k] + step));
            if (c < cost) cost = c, best = k;
        }
        f[best] += step;
        sum += step;
    }
    // Alias: small buckets are filled up by large symbols.
    int left[16];
    for (int k = 0; k < 16; k++) left[k] = f[k], t.freq[k] = f[k], t.alias[k] = k, t.divider[k] = 16;
    bool done[16] = {};
    for (;;) {
        int small = -1, large = -1;
        for (int k = 0; k < 16; k++) {
            if (!done[k] && left[k] < 16 && small < 0) small = k;
            if (!done[k] && left[k] > 16 && (large < 0 || left[k] > left[large])) large = k;
        }
        if (small < 0) break;
        t.divider[small] = left[small];
        t.alias[small] = large;
        left[large] -= 16 - left[small];
        done[small] = true;
    }
    for (int k = 0; k < 16; k++) {
        int rank = 0;
        for (int r = 0; r < t.divider[k]; r++) t.slot[k][rank++] = 16 * k + r;
        for (int b = 0; b < 16; b++) {
            if (t.divider[b] == 16 || t.alias[b] != k) continue;
            for (int r = t.divider[b]; r < 16; r++) t.slot[k][rank++] = 16 * b + r;
        }
    }
}

inline void put32(Bytes& b, size_t at, uint32_t v) { memcpy(&b[at], &v, 4); }
inline void pad16(Bytes& b) { b.resize((b.size() + 15) / 16 * 16); }

// encode returns the stored chunk of n logical bytes. A chunk of one symbol
// becomes mode 1.
inline Bytes encode(int tr, const uint8_t* p, size_t n, uint32_t seg_tiles) {
    const Layout& lay = layout(tr);
    uint32_t T = n / tile_bytes(tr), G = (T + seg_tiles - 1) / seg_tiles;
    size_t syms = 256ull * T;
    std::vector<Parts> parts(syms);
    uint64_t count[256] = {};
    for (size_t i = 0; i < syms; i++) parts[i] = split(tr, p, i), count[parts[i].value]++;
    int used = 0;
    for (uint64_t c : count) used += c != 0;
    bool constant = used == 1;
    Table t;
    Bytes out(96);
    if (constant) {
        memset(&t, 0, sizeof t);
        for (int k = 0; lay.identity && k < 16; k++) t.palette[k] = k;
        int v = parts[0].value;
        if (!lay.identity) t.palette[0] = v;
        out[0] = 1;
        out[1] = lay.identity ? v : 0;
        t.escape = -1;
    } else {
        build_table(t, count, lay.identity);
    }
    out[3] = t.escape + 1;
    put32(out, 4, T);
    memcpy(&out[16], t.palette, 16);
    if (!constant) {
        memcpy(&out[32], t.freq, 16);
        memcpy(&out[48], t.divider, 16);
        memcpy(&out[64], t.alias, 16);
        out.resize(96 + 8 * (G + 1));
        pad16(out);
    }
    for (uint32_t g = 0; g < G && !constant; g++) {
        uint32_t t0 = g * seg_tiles, t1 = std::min(T, t0 + seg_tiles);
        std::vector<uint16_t> words, pos;
        Bytes vals;
        uint32_t x[32];
        for (uint32_t& s : x) s = 1 << 16;
        auto code = [&](uint32_t& s, int k) { s = (s / t.freq[k] << 8) | t.slot[k][s % t.freq[k]]; };
        for (uint32_t tile = t1; tile-- > t0;) {
            for (int pair = 3; pair >= 0; pair--) {
                for (int l = 31; l >= 0; l--) {
                    const Parts* e = &parts[256 * tile + lane_first(l) + 2 * pair];
                    int k0 = t.symbol_of[e[0].value], k1 = t.symbol_of[e[1].value];
                    if (k0 < 0) k0 = t.escape;
                    if (k1 < 0) k1 = t.escape;
                    uint32_t limit = (uint32_t)t.freq[k0] * t.freq[k1] << 16;
                    if (x[l] >= limit) words.push_back(x[l]), x[l] >>= 16;
                    code(x[l], k1);
                    code(x[l], k0);
                }
            }
        }
        for (uint32_t i = 256 * t0; i < 256 * t1; i++) {
            if (t.symbol_of[parts[i].value] < 0) pos.push_back(i - 256 * t0), vals.push_back(parts[i].value);
        }
        std::reverse(words.begin(), words.end());
        put32(out, 96 + 8 * g, out.size());
        put32(out, 100 + 8 * g, pos.size());
        auto add = [&](const void* q, size_t m) { out.insert(out.end(), (const uint8_t*)q, (const uint8_t*)q + m); };
        add(x, 128);
        add(words.data(), 2 * words.size());
        add(pos.data(), 2 * pos.size());
        add(vals.data(), vals.size());
        pad16(out);
        put32(out, 96 + 8 * (g + 1), out.size());
    }
    for (int i = 0; i < 4 && lay.planes[i] && T; i++) {
        int bits = lay.planes[i];
        bool same = true;
        for (size_t j = 1; j < syms && same; j++) same = parts[j].plane[i] == parts[0].plane[i];
        if (same) {
            out[2] |= 1 << i;
            out[8 + i] = parts[0].plane[i];
            continue;
        }
        pad16(out);
        size_t at = out.size();
        out.resize(at + syms * bits / 8);
        for (size_t j = 0; j < syms; j++) out[at + j * bits / 8] |= parts[j].plane[i] << (j * bits % 8);
    }
    size_t full = (size_t)T * tile_bytes(tr);
    if (full < n) {
        pad16(out);
        out.insert(out.end(), p + full, p + n);
    }
    return out;
}

// Weights-like bytes: Gaussian, rounded to the element type the transform is
// for; `wild` elements in a thousand get any bits, so that there are escapes.
inline Bytes weights(int tr, size_t n, uint64_t seed, int wild = 0) {
    std::mt19937_64 rng(seed);
    std::normal_distribution<float> normal(0, 0.02f);
    Bytes b(n + 8);
    int bits = layout(tr).elem_bits;
    for (size_t i = 0; i < n * 8 / bits; i++) {
        float f = normal(rng);
        uint32_t u, e;
        memcpy(&u, &f, 4);
        int ex = (int)(u >> 23 & 255) - 127;  // a rough cast is enough here
        switch (tr) {
            case OW_BF16: e = (u + 0x7fff + (u >> 16 & 1)) >> 16; break;
            case OW_FP16: e = ex < -14 ? 0 : u >> 31 << 15 | (ex + 15) << 10 | (u >> 13 & 1023); break;
            case OW_FP32: e = u; break;
            case OW_E4M3: e = u >> 31 << 7 | std::max(0, ex + 14) << 3 | (u >> 20 & 7); break;
            case OW_E5M2: e = u >> 31 << 7 | std::max(0, ex + 15) << 2 | (u >> 21 & 3); break;
            case OW_INT8: e = (uint32_t)(int)std::lround(f * 1500) & 255; break;
            case OW_NIBBLES: e = (uint32_t)(int)std::lround(f * 120) & 15; break;
            default: e = 100 + ((int)std::lround(f * 150) & 31); break;
        }
        if (wild && (int)(rng() % 1000) < wild) e = (uint32_t)rng();
        if (bits == 4) b[i / 2] |= (e & 15) << (4 * (i % 2));
        else memcpy(&b[i * bits / 8], &e, bits / 8);
    }
    b.resize(n);
    return b;
}

}  // namespace lab
#endif
