// Splits elements into symbol values and planes: the inverse of x16_transform.cuh.
// Each lane has one unit, which is 8 consecutive elements.
#ifndef OVERWIRE_X16_SPLIT_CUH
#define OVERWIRE_X16_SPLIT_CUH

#include "x16_transform.cuh"

namespace ow {

// The elements of a lane, in the first kOut / 4 words.
struct Unit { u32 w[8]; };

template <int TR> OW_DEV Unit load_unit(const u8* p) {
    constexpr u32 n = Transform<TR>::kOut;
    Unit u = {};
    if (n == 4) u.w[0] = ldg32(p);
    if (n == 8) {
        u32x2 v = ldg64(p);
        u.w[0] = v.x, u.w[1] = v.y;
    }
    for (u32 i = 0; 16 * i + 16 <= n; i++) {
        u32x4 v = ldg128(p + 16 * i);
        u.w[4 * i] = v.x, u.w[4 * i + 1] = v.y, u.w[4 * i + 2] = v.z, u.w[4 * i + 3] = v.w;
    }
    return u;
}

// join_nibbles packs four nibbles, one per byte, into 16 bits. join_bits packs the lowest bits
// of four bytes into 4 bits.
OW_DEV u32 join_nibbles(u32 n) { return prmt(n | n >> 4, 0, 0x4420); }
OW_DEV u32 join_bits(u32 v) { return (v & 0x01010101) * 0x10204080 >> 28; }

// symbols_of_unit returns the 8 symbol values as bytes.
template <int TR> OW_DEV u32x2 symbols_of_unit(const Unit& u) {
    const u32* w = u.w;
    switch (TR) {
        case OW_BF16: return {prmt(w[0] << 1, w[1] << 1, 0x7531), prmt(w[2] << 1, w[3] << 1, 0x7531)};
        case OW_FP16: return {prmt(w[0] >> 2, w[1] >> 2, 0x7531) & 0x1f1f1f1f, prmt(w[2] >> 2, w[3] >> 2, 0x7531) & 0x1f1f1f1f};
        case OW_FP32:
            return {prmt(prmt(w[0] << 1, w[1] << 1, 0x0073), prmt(w[2] << 1, w[3] << 1, 0x0073), 0x5410),
                    prmt(prmt(w[4] << 1, w[5] << 1, 0x0073), prmt(w[6] << 1, w[7] << 1, 0x0073), 0x5410)};
        case OW_E4M3: return {w[0] >> 3 & 0x0f0f0f0f, w[1] >> 3 & 0x0f0f0f0f};
        case OW_E5M2: return {w[0] >> 2 & 0x1f1f1f1f, w[1] >> 2 & 0x1f1f1f1f};
        case OW_INT8: return {w[0] >> 4 & 0x0f0f0f0f, w[1] >> 4 & 0x0f0f0f0f};
        case OW_NIBBLES: {
            u32 lo = w[0] & 0x0f0f0f0f, hi = w[0] >> 4 & 0x0f0f0f0f;
            return {prmt(lo, hi, 0x5140), prmt(lo, hi, 0x7362)};
        }
        default: return {w[0], w[1]};
    }
}

// planes_of_unit returns the bytes of the 8 elements in each plane.
template <int TR> OW_DEV Raw<Transform<TR>::kPlanes> planes_of_unit(const Unit& u) {
    const u32* w = u.w;
    Raw<Transform<TR>::kPlanes> r = {};
    u32x2* p = r.p;
    u32 t[8];
    switch (TR) {
        case OW_BF16:
            for (int i = 0; i < 4; i++) t[i] = (w[i] << 1 & 0x00fe00fe) | (w[i] >> 15 & 0x00010001);
            p[0] = {prmt(t[0], t[1], 0x6420), prmt(t[2], t[3], 0x6420)};
            break;
        case OW_FP16:
            p[0] = {prmt(w[0], w[1], 0x6420), prmt(w[2], w[3], 0x6420)};
            for (int i = 0; i < 2; i++) {
                // `high` has the upper bytes of four elements: bits 8, 9 and 15 are bits 0, 1 and 7.
                u32 high = prmt(w[2 * i], w[2 * i + 1], 0x7531);
                p[1].x |= join_bits(high) << 4 * i;
                p[2].x |= join_bits(high >> 1) << 4 * i;
                p[3].x |= join_bits(high >> 7) << 4 * i;
            }
            break;
        case OW_FP32:
            for (int i = 0; i < 8; i++) t[i] = (w[i] >> 15 & 0xfe) | w[i] >> 31;
            p[0] = {join_bytes(t[0], t[1], t[2], t[3]), join_bytes(t[4], t[5], t[6], t[7])};
            p[1] = {prmt(prmt(w[0], w[1], 0x0051), prmt(w[2], w[3], 0x0051), 0x5410),
                    prmt(prmt(w[4], w[5], 0x0051), prmt(w[6], w[7], 0x0051), 0x5410)};
            p[2] = {join_bytes(w[0], w[1], w[2], w[3]), join_bytes(w[4], w[5], w[6], w[7])};
            break;
        case OW_E4M3:
            for (int i = 0; i < 2; i++) t[i] = (w[i] >> 4 & 0x08080808) | (w[i] & 0x07070707);
            p[0].x = join_nibbles(t[0]) | join_nibbles(t[1]) << 16;
            break;
        case OW_E5M2:
            for (int i = 0; i < 2; i++) {
                p[0].x |= join_bits(w[i]) << 4 * i;
                p[1].x |= join_bits(w[i] >> 1) << 4 * i;
                p[2].x |= join_bits(w[i] >> 7) << 4 * i;
            }
            break;
        case OW_INT8: p[0].x = join_nibbles(w[0] & 0x0f0f0f0f) | join_nibbles(w[1] & 0x0f0f0f0f) << 16; break;
        default: break;
    }
    return r;
}

// broadcast_element returns a unit of 8 equal elements. The word e contains the element at every
// position.
template <int TR> OW_DEV Unit broadcast_element(u32 e) {
    Unit u = {};
    for (u32 i = 0; i < Transform<TR>::kOut / 4; i++) u.w[i] = e;
    return u;
}

// fold_word_to_element combines the elements in a word with AND or OR. All elements of the
// result are equal.
template <int TR, bool AND> OW_DEV u32 fold_word_to_element(u32 v) {
    constexpr u32 bits = Transform<TR>::kOut * 8 / 8;  // bits per element
    if (bits == 16) {
        u32 o = v >> 16 | v << 16;
        v = AND ? v & o : v | o;
    }
    if (bits == 8) {
        for (u32 s = 8; s <= 16; s += 8) {
            u32 o = v >> s | v << (32 - s);
            v = AND ? v & o : v | o;
        }
    }
    return v;
}

}  // namespace ow
#endif
