// Copies and casts on the device. Moves copy many small raw chunks in one launch, and
// gather column slices from decoded chunks. Casts convert element types.
//
// A move reads whole aligned 32-bit words, and may read up to 3 bytes before and after a
// run. They belong to the same allocation, because allocations begin and end at multiples
// of 4.
#ifndef OVERWIRE_MOVE_CUH
#define OVERWIRE_MOVE_CUH

#include "abi_move.h"
#include "warp.cuh"

namespace ow {

// copy_unit copies unit u of a run of n bytes. The units of a run are the aligned blocks of
// 16 bytes that it overlaps in the destination, numbered from 0.
OW_DEV void copy_unit(u8* dst, const u8* src, u32 n, u32 u) {
    u32 pad = (u32)((uintptr_t)dst & 15);
    u32 lo = u == 0 ? 0 : 16 * u - pad, hi = umin(16 * u + 16 - pad, n);
    const u8* from = src + lo;
    if (hi - lo < 16) {
        for (u32 i = lo; i < hi; i++) stg8(dst + i, ldg8(src + i));
        return;
    }
    u32 off = (u32)((uintptr_t)from & 3);
    if (((uintptr_t)from & 15) == 0) {
        stg128(dst + lo, ldg128(from));
    } else if (off == 0) {
        stg128(dst + lo, {ldg32(from), ldg32(from + 4), ldg32(from + 8), ldg32(from + 12)});
    } else {
        const u8* w = from - off;
        u32 a = ldg32(w), b = ldg32(w + 4), c = ldg32(w + 8), d = ldg32(w + 12), e = ldg32(w + 16);
        u32 sel = 0x3210 + 0x1111 * off;
        stg128(dst + lo, {prmt(a, b, sel), prmt(b, c, sel), prmt(c, d, sel), prmt(d, e, sel)});
    }
}

// count_units returns the number of units of a run of n bytes at dst.
OW_DEV u32 count_units(const u8* dst, u32 n) { return (((u32)((uintptr_t)dst & 15) + n + 15) / 16); }

OW_DEV void move_part(const ow_move* moves, const ow_part* parts, u32 index) {
    ow_part part = parts[index];
    ow_move move = moves[part.job];
    u32 each = OW_MOVE_PART / move.width;
    u8* dst = (u8*)(uintptr_t)move.dst;
    const u8* src = (const u8*)(uintptr_t)move.src;
    if (each == 0) {  // a part of a row
        u32 split = (move.width + OW_MOVE_PART - 1) / OW_MOVE_PART, row = part.part / split;
        u32 at = part.part % split * OW_MOVE_PART, n = umin((u32)OW_MOVE_PART, move.width - at);
        if (row >= move.rows) return;
        dst += row * move.dst_pitch + at;
        src += row * move.src_pitch + at;
        u32 units = count_units(dst, n);
        for (u32 u = lane_id(); u < units; u += 32) copy_unit(dst, src, n, u);
        return;
    }
    // Whole rows: each row gets one lane per unit, rounded up to a power of two, at most 32.
    u32 width = 1;
    while (width < 32 && width * 16 < move.width + 15) width *= 2;
    u32 first = part.part * each, last = umin(first + each, move.rows);
    for (u32 row = first + lane_id() / width; row < last; row += 32 / width) {
        u8* to = dst + row * move.dst_pitch;
        u32 units = count_units(to, move.width);
        for (u32 u = lane_id() % width; u < units; u += width) copy_unit(to, src + row * move.src_pitch, move.width, u);
    }
}

// Casts go through the bits of a float32, which can represent every value of the other
// types. They round to nearest, ties to even. A NaN stays a NaN.

// widen_to_f32 converts a float with E exponent bits, M mantissa bits and IEEE infinities to
// the bits of a float32. The result is exact.
OW_DEV u32 widen_to_f32(u32 v, u32 E, u32 M) {
    u32 sign = v >> (E + M) << 31, exp = v >> M & ((1u << E) - 1), man = v & ((1u << M) - 1);
    u32 bias = (1u << (E - 1)) - 1;
    if (exp == (1u << E) - 1) return sign | 0x7f800000 | man << (23 - M) | (man ? 0x400000 : 0);
    if (exp == 0) {
        if (man == 0) return sign;
        exp = 1;
        while (!(man >> M)) man <<= 1, exp--;  // may wrap below 0; the addition of the bias corrects it
        man &= (1u << M) - 1;
    }
    return sign | (exp + 127 - bias) << 23 | man << (23 - M);
}

OW_DEV u32 load_cast_element(u32 from, const u8* p) {
    switch (from) {
        case OW_CAST_F32: return ldg32(p);
        case OW_CAST_BF16: return ldg16(p) << 16;
        case OW_CAST_F16: return widen_to_f32(ldg16(p), 5, 10);
        case OW_CAST_E5M2: return widen_to_f32(ldg8(p), 5, 2);
    }
    u32 v = ldg8(p);  // E4M3 has no infinities, and one NaN per sign
    if ((v & 127) == 127) return (v & 128) << 24 | 0x7fc00000;
    if ((v & 0x78) == 0x78) return (v & 128) << 24 | (15 + 120) << 23 | (v & 7) << 20;
    return widen_to_f32(v, 4, 3);
}

OW_DEV u32 f32_to_bf16(u32 f) {
    if ((f & 0x7fffffff) > 0x7f800000) return (f >> 16 & 0x8000) | 0x7fc0 | (f >> 16 & 0x3f);
    return (f + 0x7fff + (f >> 16 & 1)) >> 16;
}

OW_DEV u32 f32_to_f16(u32 f) {
    u32 sign = f >> 16 & 0x8000, a = f & 0x7fffffff;
    if (a > 0x7f800000) return sign | 0x7e00 | (a >> 13 & 0x1ff);
    if (a >= 0x47800000) return sign | 0x7c00;  // 65536 or more
    if (a >= 0x38800000) {                      // normal; rounding may carry into infinity
        return sign | ((a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13);
    }
    if (a < 0x33000000) return sign;  // below half of the smallest subnormal
    u32 man = (a & 0x7fffff) | 0x800000, shift = 126 - (a >> 23), rest = man & ((1u << shift) - 1);
    u32 half = 1u << (shift - 1), v = man >> shift;
    return sign | (v + (rest > half || (rest == half && (v & 1))));
}

OW_DEV u32 size_of_cast_type(u32 t) { return t == OW_CAST_F32 ? 4 : t == OW_CAST_BF16 || t == OW_CAST_F16 ? 2 : 1; }

OW_DEV void cast_part(const ow_cast* casts, const ow_part* parts, u32 index) {
    ow_part part = parts[index];
    ow_cast cast = casts[part.job];
    u64 first = (u64)part.part * OW_CAST_PART;
    if (first >= cast.n || cast.from > OW_CAST_E5M2) return;
    u64 rest = cast.n - first;
    u32 n = rest < OW_CAST_PART ? (u32)rest : (u32)OW_CAST_PART;
    const u8* src = (const u8*)(uintptr_t)cast.src + first * size_of_cast_type(cast.from);
    u8* dst = (u8*)(uintptr_t)cast.dst + first * size_of_cast_type(cast.to);
    for (u32 i = lane_id(); i < n; i += 32) {
        u32 f = load_cast_element(cast.from, src + i * size_of_cast_type(cast.from));
        if (cast.to == OW_CAST_F32) stg32(dst + 4 * i, f);
        else stg16(dst + 2 * i, cast.to == OW_CAST_BF16 ? f32_to_bf16(f) : f32_to_f16(f));
    }
}

}  // namespace ow
#endif
