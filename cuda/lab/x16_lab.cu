// The X16 decoder that ships, and other ways to build it (README.md). One text, two programs:
//   nvcc: every kernel verified against the reference decoder, then timed.
//   g++:  every kernel run by the host warp on small data, then on corrupt data.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "../x16_decode.cuh"
#include "x16_encode.h"
#include "x16_reference.h"

namespace lab {

using namespace ow;

struct Bulk512 : X16Best { static constexpr bool kBulk = true; };
struct Bulk1024 : Bulk512 { static constexpr u32 kBlock = 1024; };
struct Ring1024 : X16Best { static constexpr u32 kBlock = 1024; };
struct Permute : X16Best { static constexpr bool kMulRefill = false; };
struct MulShift : X16Best { static constexpr bool kMulShift = true; };
struct Unroll2 : X16Best { static constexpr int kUnroll = 2; };

// VARIANT(number, how it is built, whether the host warp runs all transforms or bf16 alone, text)
#define OW_LAB_VARIANTS(VARIANT)                                                    \
    VARIANT(1, X16Best, true, "words by cp.async, checked once a tile")             \
    VARIANT(2, Bulk512, true, "as 1, words by bulk copies of 512 bytes")            \
    VARIANT(3, Bulk1024, true, "as 2, 1 KiB")                                       \
    VARIANT(4, Ring1024, false, "as 1, ring of 2 x 1 KiB")                          \
    VARIANT(5, Permute, false, "as 1, refill by byte permute")                      \
    VARIANT(6, MulShift, false, "as 1, x >> 8 by the multiplier")                   \
    VARIANT(7, Unroll2, false, "as 1, two tiles a turn")

struct Variant { int id; bool all; const char* text; };
#define AS_ROW(id, cfg, all, text) {id, all, text},
const Variant kVariants[] = {OW_LAB_VARIANTS(AS_ROW)};

// One chunk to decode: its logical bytes are known, or it is corrupt.
struct Case {
    std::string name;
    int tr;
    uint32_t seg_tiles;
    Bytes plain, stored;
    bool good = true;  // the reference accepts it, and gives plain
};

inline uint32_t jobs_of(int tr, size_t logical, uint32_t seg_tiles) {
    uint32_t T = logical / tile_bytes(tr);
    return std::max(1u, (T + seg_tiles - 1) / seg_tiles);
}

// Every shape of chunk the format has, for every transform.
inline std::vector<Case> good_cases() {
    std::vector<Case> r;
    auto add = [&](const char* name, int tr, Bytes p, uint32_t seg) {
        Bytes s = encode(tr, p.data(), p.size(), seg);
        r.push_back({std::string(layout(tr).name) + " " + name, tr, seg, std::move(p), std::move(s)});
    };
    for (int tr = OW_BF16; tr <= OW_BYTES; tr++) {
        size_t tile = tile_bytes(tr);
        add("one tile", tr, weights(tr, tile, tr), 128);
        add("short last segment", tr, weights(tr, 21 * tile, tr + 10), 8);
        add("tail", tr, weights(tr, 9 * tile + tile / 2 + 1, tr + 20), 4);
        add("escapes", tr, weights(tr, 40 * tile, tr + 30, 3), 32);
        add("many escapes", tr, weights(tr, 24 * tile + 3, tr + 40, 300), 16);
        add("long segment", tr, weights(tr, 300 * tile, tr + 50, 1), 256);
        add("segments of one tile", tr, weights(tr, 12 * tile, tr + 60), 1);
        add("one value", tr, Bytes(11 * tile + 5, 0x3c), 4);
        Bytes bare = weights(tr, tile - 3, tr + 70), none(112 + bare.size());  // no tile at all
        std::copy(bare.begin(), bare.end(), none.begin() + 112);
        r.push_back({std::string(layout(tr).name) + " tail only", tr, 4, bare, none});
        Bytes flat(20 * tile);  // all symbols equally often: every word is used
        for (size_t i = 0; i < flat.size(); i++) flat[i] = (uint8_t)(i * 2654435761u >> 11);
        add("flat", tr, flat, 8);
    }
    Bytes p = weights(OW_FP32, 30 << 10, 5);
    for (size_t i = 0; i < p.size(); i += 4) p[i] = p[i + 1] = 0;
    add("that holds bf16", OW_FP32, p, 16);
    p = weights(OW_BF16, 30 << 9, 6);
    for (size_t i = 0; i < p.size(); i += 2) p[i] &= 0x80, p[i + 1] &= 0x7f;
    add("of positive powers of two", OW_BF16, p, 16);
    add("1 MiB", OW_BF16, weights(OW_BF16, 1 << 20, 99), 128);
    return r;
}

// A small chunk with bits flipped, bytes replaced or its end cut off.
inline Case corrupt_case(std::mt19937_64& rng) {
    Case c;
    c.name = "corrupt";
    c.tr = rng() % 8 + 1;
    size_t n = tile_bytes(c.tr) * (1 + rng() % 12) + rng() % 40;
    c.seg_tiles = 1 + rng() % 6;
    c.plain = weights(c.tr, n, rng(), rng() % 3 ? 20 : 0);
    c.stored = encode(c.tr, c.plain.data(), n, c.seg_tiles);
    Bytes& s = c.stored;
    switch (rng() % 4) {
        case 0: s.resize(rng() % (s.size() + 1)); break;
        case 1: s[rng() % std::min<size_t>(s.size(), 96 + 8 * 13)] ^= 1 << rng() % 8; break;
        case 2: s[rng() % s.size()] = (uint8_t)rng(); break;
        default: for (int k = 0; k < 20; k++) s[rng() % s.size()] = (uint8_t)rng();
    }
    c.good = reference_decode(c.tr, s, c.plain.data(), n, c.seg_tiles);
    return c;
}

}  // namespace lab

#ifdef __CUDACC__
#include "lab_device.cuh"
#else
#include "lab_host.h"
#endif
