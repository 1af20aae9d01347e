// CRC-32C (Castagnoli) of stored bytes on the device: a warp sums a part, the host adds
// up the parts of a chunk.
//
// A CRC is a remainder of polynomials over GF(2), so parts can be summed apart and added:
// lane l of a warp takes word l of each 128 bytes, and its sum moves on by 128 bytes with
// eight lookups in tables of 16 words, which lie in different banks. The lowest bit of a
// word is its highest power of x.
//
// A part is read in whole aligned words, so up to 3 bytes on either side of it are read,
// and not summed; both ends of any allocation are aligned to that.
#ifndef OVERWIRE_CRC_CUH
#define OVERWIRE_CRC_CUH

#include "abi_crc.h"
#include "warp.cuh"

namespace ow {

constexpr u32 kCrcPoly = 0x82f63b78, kCrcOne = 0x80000000;
constexpr u32 kCrcShared = 4 * 128;  // bytes of shared memory of a warp

constexpr u32 crc_next(u32 a) { return a >> 1 ^ (a & 1 ? kCrcPoly : 0); }  // a * x

constexpr u32 crc_product(u32 a, u32 b) {
    u32 p = 0;
    for (; a; a <<= 1, b = crc_next(b)) p ^= a & kCrcOne ? b : 0;
    return p;
}

struct CrcWords { u32 of[32]; };  // by lane

// x^(8 * bytes from a lane's word to the end of its row): lane 0 has that of a whole row.
constexpr CrcWords crc_words() {
    CrcWords t = {};
    u32 word = kCrcOne;
    for (int i = 0; i < 32; i++) word = crc_next(word);
    t.of[31] = word;
    for (int i = 30; i >= 0; i--) t.of[i] = crc_product(t.of[i + 1], word);
    return t;
}

OW_TABLE CrcWords kCrcWords = crc_words();

// multiply_crc is crc_product at run time.
OW_DEV u32 multiply_crc(u32 a, u32 b) {
    u32 p = 0;
    OW_UNROLL(1)
    for (u32 i = 0; i < 32; i++) {
        p ^= b & (0 - (a >> 31));
        a <<= 1;
        b = b >> 1 ^ (kCrcPoly & (0 - (b & 1)));
    }
    return p;
}

// fill_crc_table fills the table of a warp: word 16 k + v is nibble k with value v, 128 bytes
// further on.
OW_DEV void fill_crc_table(u32 table) {
    u32 bit = kCrcWords.of[0];  // this lane's bit, moved so
    OW_UNROLL(1)
    for (u32 i = lane_id(); i < 31; i++) bit = bit >> 1 ^ (kCrcPoly & (0 - (bit & 1)));
    OW_UNROLL(1)
    for (u32 k = 0; k < 8; k++) {
        u32 v = 0;
        for (u32 i = 0; i < 4; i++) v ^= shfl(bit, 4 * k + i) & (0 - (lane_id() >> i & 1));
        if (lane_id() < 16) sts32(table + 64 * k + 4 * lane_id(), v);
    }
    syncwarp();
}

// advance_crc is s, 128 bytes further on.
OW_DEV u32 advance_crc(u32 s, u32 table) {
    u32 v = 0;
    OW_UNROLL(2)
    for (u32 k = 0; k < 8; k++, s >>= 4) v ^= lds32(table + 64 * k + (s & 15) * 4);
    return v;
}

// load_crc_word is the word at p, without its bytes outside [begin, end).
OW_DEV u32 load_crc_word(u64 p, u64 begin, u64 end) {
    if (p + 4 <= begin || p >= end) return 0;
    u32 w = ldg32((const u8*)(uintptr_t)p);
    if (p < begin) w &= 0xffffffff << (8 * (u32)(begin - p));
    if (p + 4 > end) w &= 0xffffffff >> (8 * (u32)(p + 4 - end));
    return w;
}

// sum_crc_part sums part i. `table` is shared memory of this warp.
OW_DEV void sum_crc_part(const ow_crc_part* parts, u32* sums, u32 i, u32 table) {
    fill_crc_table(table);
    ow_crc_part part = parts[i];
    u64 begin = part.src, end = begin + part.bytes, stop = (end + 3) & ~(u64)3;
    u32 rows = (u32)(stop - begin + 127) / 128;
    u64 at = stop - 128 * (u64)rows + 4 * lane_id();
    u32 s = 0;
    OW_UNROLL(1)
    for (u32 r = 0; r < rows; r += 4) {  // four loads are on their way at a time
        u32 w[4];
        OW_UNROLL(4)
        for (u32 k = 0; k < 4; k++, at += 128) w[k] = load_crc_word(at, begin, end);
        OW_UNROLL(4)
        for (u32 k = 0; k < 4; k++)
            if (r + k < rows) s = advance_crc(s, table) ^ w[k];
    }
    s = multiply_crc(s, kCrcWords.of[lane_id()]);
    OW_UNROLL(1)
    for (u32 d = 16; d > 0; d /= 2) s ^= shfl(s, lane_id() ^ d);
    s = multiply_crc(s, part.behind);
    if (lane_id() == 0) stg32((u8*)(sums + i), s);
}

}  // namespace ow
#endif
