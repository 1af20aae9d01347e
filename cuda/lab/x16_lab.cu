// The X16 kernel ladder (README.md). One text, two programs:
//   nvcc: every kernel verified against the reference decoder, then timed.
//   g++:  every kernel run by the host warp on small data, then on corrupt data.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "ladder.cuh"
#include "variants.h"
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

constexpr bool kAll = true, kBf16Only = false;

// What a variant runs for one segment job.
template <class C> struct Body {
    typedef C Cfg;
    static constexpr bool kPersistent = false;
    template <int TR>
    OW_DEV void run(const ow_x16_chunk* c, const ow_x16_seg* s, u32 job, u32* status, X16Place place, u32& phase) {
        x16_job<TR, C>(c, s, job, status, place, phase);
    }
};
template <class C> struct Persistent : Body<C> {
    static constexpr bool kPersistent = true;
};
template <int N> struct Rung {
    typedef X16Best Cfg;
    static constexpr bool kPersistent = false;
    template <int TR>
    OW_DEV void run(const ow_x16_chunk* c, const ow_x16_seg* s, u32 job, u32* status, X16Place place, u32&) {
        rung_job<N>(c, s, job, status, place);
    }
};

struct Variant { int id; bool all; int warps; const char* text; };
#define AS_ROW(id, body, all, warps, blocks, text) {id, all, warps, text},
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

// Rungs 1 to 3 take bf16 chunks of whole tiles in mode 0 only.
inline bool takes(const Variant& v, const Case& c) {
    return v.all || (c.tr == OW_BF16 && c.stored[0] == 0 && c.stored[2] == 0 && c.plain.size() % 512 == 0);
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
