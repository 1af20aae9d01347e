// Combines decoded symbols and raw planes into elements, for each transform of
// docs/format.md 3.1.
//
// A lane has 8 consecutive symbols of a tile, as 8 table entries. The low 16 bits of
// an entry are the symbol's value, shifted to its position in the element. Each
// transform defines its planes, the bits per symbol of each plane, and how symbols
// and planes merge into the lane's output bytes.
#ifndef OVERWIRE_X16_TRANSFORM_CUH
#define OVERWIRE_X16_TRANSFORM_CUH

#include "abi.h"
#include "warp.cuh"

namespace ow {

// lane_unit returns the lane's position in a tile, in units of 8 symbols.
OW_DEV u32 lane_unit() { return (lane_id() & 16) + 4 * (lane_id() & 3) + (lane_id() >> 2 & 3); }

// A plane has plane_bits bits per symbol: 8, 4 or 1. It therefore has plane_bits bytes per 8
// symbols, and 32 * plane_bits bytes per tile.
template <int TR> struct Transform;

// A lane's plane bytes for one tile: two words per plane. Planes of 4 bits or 1 bit use
// only the low bytes of x.
template <int N> struct Raw { u32x2 p[N ? N : 1]; };

// join_halves packs the low halves of two table entries into a word, and join_bytes the low
// bytes of four.
OW_DEV u32 join_halves(u32 e0, u32 e1) { return prmt(e0, e1, 0x5410); }
OW_DEV u32 join_bytes(u32 e0, u32 e1, u32 e2, u32 e3) {
    return prmt(prmt(e0, e1, 0x0040), prmt(e2, e3, 0x0040), 0x5410);
}
// Converts four bytes from `mantissa << 1 | sign` to `sign << 7 | mantissa`.
OW_DEV u32 move_sign_first(u32 r) { return select_bits<0x80808080>(r << 7, r >> 1); }
// Spreads the nibbles of the low 16 bits to four bytes.
OW_DEV u32 spread_nibbles(u32 v) {
    v = prmt(v, 0, 0x4140);
    return (v | v << 4) & 0x0f0f0f0f;
}
// Spreads bits 0..3 to the lowest bits of four bytes.
OW_DEV u32 spread_bits(u32 v) { return (v & 15) * 0x00204081 & 0x01010101; }
OW_DEV u32 bit_of(const u8* plane, u32 n) { return ldg8(plane + n / 8) >> (n % 8) & 1; }

template <> struct Transform<OW_BF16> {
    static constexpr bool kEscapes = true;
    static constexpr int kPlanes = 1;
    static constexpr u32 kOut = 16;  // output bytes of a lane in a tile
    OW_DEV u32 plane_bits(int) { return 8; }
    OW_DEV u32 place_symbol(u32 v) { return v << 7; }
    OW_DEV void store_unit(u8* out, const u32* e, const Raw<1>& raw) {
        // Sign and mantissa come from the plane, the exponent comes from the table. prmt
        // makes a half word of a byte and its replicated sign.
        u32 a = move_sign_first(raw.p[0].x), b = move_sign_first(raw.p[0].y);
        u32x4 w;
        w.x = (prmt(a, 0, 0x9180) & 0x807f807f) | join_halves(e[0], e[1]);
        w.y = (prmt(a, 0, 0xb3a2) & 0x807f807f) | join_halves(e[2], e[3]);
        w.z = (prmt(b, 0, 0x9180) & 0x807f807f) | join_halves(e[4], e[5]);
        w.w = (prmt(b, 0, 0xb3a2) & 0x807f807f) | join_halves(e[6], e[7]);
        stg128(out, w);
    }
    // write_element writes element n of the chunk. p has the planes, null for constant planes,
    // and k has the constants.
    OW_DEV void write_element(u8* dst, u32 n, u32 v, const u8* const* p, const u32* k) {
        u32 r = p[0] ? ldg8(p[0] + n) : k[0];
        stg16(dst + 2 * (u64)n, (r & 1) << 15 | v << 7 | r >> 1);
    }
};

template <> struct Transform<OW_FP16> {
    static constexpr bool kEscapes = true;
    static constexpr int kPlanes = 4;
    static constexpr u32 kOut = 16;
    OW_DEV u32 plane_bits(int i) { return i == 0 ? 8 : 1; }
    OW_DEV u32 place_symbol(u32 v) { return (v & 31) << 10; }
    OW_DEV void store_unit(u8* out, const u32* e, const Raw<4>& raw) {
        u32 b = raw.p[1].x & 255, c = raw.p[2].x & 255, d = raw.p[3].x & 255;
        u32 w[4];
        for (int j = 0; j < 4; j++) {
            u32 low = prmt(j < 2 ? raw.p[0].x : raw.p[0].y, 0, j & 1 ? 0x4342 : 0x4140);
            u32 b2 = b >> 2 * j, c2 = c >> 2 * j, d2 = d >> 2 * j;
            w[j] = low | join_halves(e[2 * j], e[2 * j + 1]) | ((b2 << 8 | b2 << 23) & 0x01000100) |
                   ((c2 << 9 | c2 << 24) & 0x02000200) | ((d2 << 15 | d2 << 30) & 0x80008000);
        }
        stg128(out, {w[0], w[1], w[2], w[3]});
    }
    OW_DEV void write_element(u8* dst, u32 n, u32 v, const u8* const* p, const u32* k) {
        u32 r = p[0] ? ldg8(p[0] + n) : k[0];
        r |= (p[1] ? bit_of(p[1], n) : k[1] & 1) << 8;
        r |= (p[2] ? bit_of(p[2], n) : k[2] & 1) << 9;
        r |= (p[3] ? bit_of(p[3], n) : k[3] & 1) << 15;
        stg16(dst + 2 * (u64)n, r | (v & 31) << 10);
    }
};

template <> struct Transform<OW_FP32> {
    static constexpr bool kEscapes = true;
    static constexpr int kPlanes = 3;
    static constexpr u32 kOut = 32;
    OW_DEV u32 plane_bits(int) { return 8; }
    OW_DEV u32 place_symbol(u32 v) { return v << 7; }
    OW_DEV void store_unit(u8* out, const u32* e, const Raw<3>& raw) {
        for (int half = 0; half < 2; half++) {
            u32 a = move_sign_first(half ? raw.p[0].y : raw.p[0].x);
            u32 b = half ? raw.p[1].y : raw.p[1].x, c = half ? raw.p[2].y : raw.p[2].x;
            const u32* f = e + 4 * half;
            // The upper halves are made as in bf16. The lower halves come from the
            // other two planes.
            u32 h01 = (prmt(a, 0, 0x9180) & 0x807f807f) | join_halves(f[0], f[1]);
            u32 h23 = (prmt(a, 0, 0xb3a2) & 0x807f807f) | join_halves(f[2], f[3]);
            u32 l01 = prmt(c, b, 0x5140), l23 = prmt(c, b, 0x7362);
            stg128(out + 16 * half, {prmt(l01, h01, 0x5410), prmt(l01, h01, 0x7632), prmt(l23, h23, 0x5410),
                                     prmt(l23, h23, 0x7632)});
        }
    }
    OW_DEV void write_element(u8* dst, u32 n, u32 v, const u8* const* p, const u32* k) {
        u32 r = p[0] ? ldg8(p[0] + n) : k[0];
        u32 m = (p[1] ? ldg8(p[1] + n) : k[1]) << 8 | (p[2] ? ldg8(p[2] + n) : k[2]);
        stg32(dst + 4 * (u64)n, (r & 1) << 31 | v << 23 | r >> 1 << 16 | m);
    }
};

template <> struct Transform<OW_E4M3> {
    static constexpr bool kEscapes = false;
    static constexpr int kPlanes = 1;
    static constexpr u32 kOut = 8;
    OW_DEV u32 plane_bits(int) { return 4; }
    OW_DEV u32 place_symbol(u32 v) { return (v & 15) << 3; }
    OW_DEV u32 word(u32 nibbles, u32 e) {
        u32 n = spread_nibbles(nibbles);
        return (n & 0x07070707) | (n << 4 & 0x80808080) | e;
    }
    OW_DEV void store_unit(u8* out, const u32* e, const Raw<1>& raw) {
        stg64(out, {word(raw.p[0].x, join_bytes(e[0], e[1], e[2], e[3])),
                    word(raw.p[0].x >> 16, join_bytes(e[4], e[5], e[6], e[7]))});
    }
    OW_DEV void write_element(u8* dst, u32 n, u32 v, const u8* const* p, const u32* k) {
        u32 r = (p[0] ? ldg8(p[0] + n / 2) >> (n % 2 * 4) : k[0]) & 15;
        stg8(dst + n, (r & 8) << 4 | (v & 15) << 3 | (r & 7));
    }
};

template <> struct Transform<OW_E5M2> {
    static constexpr bool kEscapes = true;
    static constexpr int kPlanes = 3;
    static constexpr u32 kOut = 8;
    OW_DEV u32 plane_bits(int) { return 1; }
    OW_DEV u32 place_symbol(u32 v) { return (v & 31) << 2; }
    OW_DEV void store_unit(u8* out, const u32* e, const Raw<3>& raw) {
        u32 w[2];
        for (int j = 0; j < 2; j++) {
            u32 a = spread_bits(raw.p[0].x >> 4 * j), b = spread_bits(raw.p[1].x >> 4 * j);
            u32 c = spread_bits(raw.p[2].x >> 4 * j);
            const u32* f = e + 4 * j;
            w[j] = a | b << 1 | c << 7 | join_bytes(f[0], f[1], f[2], f[3]);
        }
        stg64(out, {w[0], w[1]});
    }
    OW_DEV void write_element(u8* dst, u32 n, u32 v, const u8* const* p, const u32* k) {
        u32 r = (p[0] ? bit_of(p[0], n) : k[0] & 1) | (p[1] ? bit_of(p[1], n) : k[1] & 1) << 1 |
                (p[2] ? bit_of(p[2], n) : k[2] & 1) << 7;
        stg8(dst + n, r | (v & 31) << 2);
    }
};

template <> struct Transform<OW_INT8> {
    static constexpr bool kEscapes = false;
    static constexpr int kPlanes = 1;
    static constexpr u32 kOut = 8;
    OW_DEV u32 plane_bits(int) { return 4; }
    OW_DEV u32 place_symbol(u32 v) { return (v & 15) << 4; }
    OW_DEV void store_unit(u8* out, const u32* e, const Raw<1>& raw) {
        stg64(out, {spread_nibbles(raw.p[0].x) | join_bytes(e[0], e[1], e[2], e[3]),
                    spread_nibbles(raw.p[0].x >> 16) | join_bytes(e[4], e[5], e[6], e[7])});
    }
    OW_DEV void write_element(u8* dst, u32 n, u32 v, const u8* const* p, const u32* k) {
        u32 r = (p[0] ? ldg8(p[0] + n / 2) >> (n % 2 * 4) : k[0]) & 15;
        stg8(dst + n, r | (v & 15) << 4);
    }
};

template <> struct Transform<OW_NIBBLES> {
    static constexpr bool kEscapes = false;
    static constexpr int kPlanes = 0;
    static constexpr u32 kOut = 4;
    OW_DEV u32 plane_bits(int) { return 0; }
    OW_DEV u32 place_symbol(u32 v) { return v & 15; }
    OW_DEV void store_unit(u8* out, const u32* e, const Raw<0>&) {
        u32 a = join_bytes(e[0], e[2], e[4], e[6]), b = join_bytes(e[1], e[3], e[5], e[7]);
        stg32(out, a | b << 4);
    }
    OW_DEV void write_element(u8*, u32, u32, const u8* const*, const u32*) {}
};

template <> struct Transform<OW_BYTES> {
    static constexpr bool kEscapes = true;
    static constexpr int kPlanes = 0;
    static constexpr u32 kOut = 8;
    OW_DEV u32 plane_bits(int) { return 0; }
    OW_DEV u32 place_symbol(u32 v) { return v; }
    OW_DEV void store_unit(u8* out, const u32* e, const Raw<0>&) {
        stg64(out, {join_bytes(e[0], e[1], e[2], e[3]), join_bytes(e[4], e[5], e[6], e[7])});
    }
    OW_DEV void write_element(u8* dst, u32 n, u32 v, const u8* const*, const u32*) { stg8(dst + n, v); }
};

}  // namespace ow
#endif
