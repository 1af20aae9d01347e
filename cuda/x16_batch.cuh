// X16 chunks as batch items: a block decodes a chunk, or several share it. Nobody has looked at
// their headers, so each block does: what is accepted is what the Go decoder's
// Check accepts (gosrc/codec/x16/parse.go).
#ifndef OVERWIRE_X16_BATCH_CUH
#define OVERWIRE_X16_BATCH_CUH

#include "abi_batch.h"
#include "x16_decode.cuh"

namespace ow {

// A job as an item says it.
struct X16Item {
    ow_x16_chunk c;
    u32 s;
    OW_DEV const ow_x16_chunk& chunk(const X16Item& i) { return i.c; }
    OW_DEV u32 seg(const X16Item& i) { return i.s; }
};

// What x16_vet has to know of a transform: bytes of a tile, symbol values, whether
// there are escapes, and the widths of its planes, four bits each.
struct X16Form { u32 tile, values; bool escapes; u32 planes, widths; };

template <int TR> OW_DEV X16Form x16_form() {
    typedef Transform<TR> X;
    X16Form f = {32 * X::kOut, TR == OW_FP16 || TR == OW_E5M2 ? 32 : X::kEscapes ? 256 : 16, X::kEscapes, X::kPlanes, 0};
    for (int i = 0; i < X::kPlanes; i++) f.widths |= X::width(i) << 4 * i;
    return f;
}

// x16_vet checks header, table, and directory. Returns 0 or a status; all lanes
// agree. x16_open checks the rest.
OW_COLD u32 x16_vet(const ow_x16_chunk& c, X16Form form) {
    if (c.stored < kX16Header || c.tiles == 0 || c.tiles > 256) return OW_X16_LAYOUT;
    const u8* src = (const u8*)(uintptr_t)c.src;
    u32 total = c.logical / form.tile, mode = ldg8(src), symbol = ldg8(src + 1), escape = ldg8(src + 3) - 1;
    if (total == 0 || mode > 1 || symbol > 15 || (mode == 0 && symbol)) return OW_X16_LAYOUT;
    // Lane k < 16 has symbol and bucket k; lanes 8..15 also byte k of the header.
    u32 k = lane() & 15, v = ldg8(src + 16 + k), f = ldg8(src + 32 + k), d = ldg8(src + 48 + k), a = ldg8(src + 64 + k);
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
        u32 given = umin(d, 16), sum = 0;
    OW_UNROLL(1)
        for (u32 i = 0; i < 16; i++) {
            u32 alias = shfl(a, i), rest = 16 - umin(shfl(d, i), 16);
            if (alias == k) given += rest;
            sum += shfl(f, i);
        }
        bad = bad || given != f || sum != 256;
    }
    if (ballot(bad)) return OW_X16_LAYOUT;
    if (mode) return 0;
    u32 segs = (total + c.tiles - 1) / c.tiles, first = (kX16Header + 8 * (segs + 1) + 15) / 16 * 16;
    if (first > c.stored) return OW_X16_LAYOUT;
    const u8* dir = src + kX16Header;
    bad = ldg32(dir) != first || ldg32(dir + 8 * segs + 4) != 0;
    OW_UNROLL(1)
    for (u32 at = kX16Header + 8 * (segs + 1) + lane(); at < first; at += 32) bad = bad || ldg8(src + at);
    OW_UNROLL(1)
    for (u32 s = lane(); s < segs; s += 32) {
        u32x2 here = ldg64(dir + 8 * s), next = ldg64(dir + 8 * s + 8);
        u32 tiles = umin(c.tiles, total - s * c.tiles);
        bad = bad || here.y > 256 * tiles || next.x > c.stored || here.x > next.x || next.x - here.x < 128 + 3 * here.y;
    }
    return ballot(bad) ? OW_X16_LAYOUT : 0;
}

// x16_chunk is the chunk that an item says, if it can be one.
OW_DEV bool x16_chunk(const ow_batch_item& it, ow_x16_chunk& c) {
    c = {it.src, it.dst, (u32)it.src_len, (u32)it.dst_cap, (uint16_t)(it.arg >> 16), 0, 0};
    return !(it.src_len > (16 << 20) + 4096 || it.dst_cap > 16 << 20 || (it.src | it.dst) % 16 || c.tiles == 0 || c.tiles > 256);
}

// x16_chunk_job decodes a warp's share of a chunk's segments.
template <int TR> OW_DEV void x16_chunk_job(const ow_x16_chunk& c, u32* status, X16Place place, u32 warp, u32 warps) {
    u32 bad = x16_vet(c, x16_form<TR>()), phase = 0;
    if (bad) {
        if (warp == 0 && lane() == 0) raise(status, bad);
        return;
    }
    u32 total = c.logical / (32 * Transform<TR>::kOut), segs = (total + c.tiles - 1) / c.tiles;
    OW_UNROLL(1)
    for (u32 s = warp; s < segs; s += warps) {
        u32 low = 0;  // states begin at 2^16 or above; mode 1 has none
        const u8* src = (const u8*)(uintptr_t)c.src;
        if (ldg8(src) == 0) low = ballot(ldg32(src + ldg32(src + kX16Header + 8 * s) + 4 * lane()) < 0x10000);
        if (low) {
            if (lane() == 0) raise(status, OW_X16_STATE);
            continue;
        }
        x16_segment<TR, X16Best>(X16Item{c, s}, status, place, phase);
    }
}

OW_DEV bool x16_known(u32 arg) { return (arg & 0xffff) >= OW_BF16 && (arg & 0xffff) <= OW_BYTES; }

// x16_item_job is a warp's share of an item, for which x16_chunk and x16_known
// are true.
OW_DEV void x16_item_job(const ow_batch_item& it, u32* status, X16Place place, u32 warp, u32 warps) {
    ow_x16_chunk c;
    x16_chunk(it, c);
    switch (it.arg & 0xffff) {
        case OW_BF16: return x16_chunk_job<OW_BF16>(c, status, place, warp, warps);
        case OW_FP16: return x16_chunk_job<OW_FP16>(c, status, place, warp, warps);
        case OW_FP32: return x16_chunk_job<OW_FP32>(c, status, place, warp, warps);
        case OW_E4M3: return x16_chunk_job<OW_E4M3>(c, status, place, warp, warps);
        case OW_E5M2: return x16_chunk_job<OW_E5M2>(c, status, place, warp, warps);
        case OW_INT8: return x16_chunk_job<OW_INT8>(c, status, place, warp, warps);
        case OW_NIBBLES: return x16_chunk_job<OW_NIBBLES>(c, status, place, warp, warps);
        case OW_BYTES: return x16_chunk_job<OW_BYTES>(c, status, place, warp, warps);
    }
}

}  // namespace ow
#endif
