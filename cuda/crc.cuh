// Computes CRC-32C (Castagnoli) of stored bytes on the device. A warp sums one part, and
// the host adds up the sums of a chunk's parts.
//
// A CRC is a polynomial remainder over GF(2), so the sums of parts can be added. Lane l of
// a warp takes word l of every 128 bytes. To advance its sum by 128 bytes, it looks up each
// of the sum's eight nibbles in a separate table of 16 words. The words of a table are in
// different banks, so lanes do not conflict. Bit 0 of a word is the coefficient of its
// highest power of x.
//
// A part is read in whole aligned words. Up to 3 bytes before and after the part are also
// read, but not summed. They belong to the same allocation, because allocations begin and
// end at multiples of 4.
#ifndef OVERWIRE_CRC_CUH
#define OVERWIRE_CRC_CUH

#include "abi_crc.h"
#include "warp.cuh"

namespace ow {

constexpr u32 kCrcPoly = 0x82f63b78, kCrcOne = 0x80000000;
constexpr u32 kCrcShared = 4 * 128;  // bytes of shared memory of a warp

constexpr u32 crc_times_x(u32 a) { return a >> 1 ^ (a & 1 ? kCrcPoly : 0); }  // a * x

constexpr u32 crc_product(u32 a, u32 b) {
    u32 p = 0;
    for (; a; a <<= 1, b = crc_times_x(b)) p ^= a & kCrcOne ? b : 0;
    return p;
}

struct CrcWords { u32 of[32]; };  // one word per lane

// crc_lane_powers returns x^(8 * n) for each lane, where n is the number of bytes from the start
// of the lane's word to the end of its row of 128 bytes. Lane 0 has n = 128.
constexpr CrcWords crc_lane_powers() {
    CrcWords t = {};
    u32 word = kCrcOne;
    for (int i = 0; i < 32; i++) word = crc_times_x(word);
    t.of[31] = word;
    for (int i = 30; i >= 0; i--) t.of[i] = crc_product(t.of[i + 1], word);
    return t;
}

OW_TABLE CrcWords kCrcWords = crc_lane_powers();

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

// fill_crc_table fills the table of a warp. Word 16 k + v is the value v of nibble k, advanced
// by 128 bytes.
OW_DEV void fill_crc_table(u32 table) {
    u32 bit = kCrcWords.of[0];  // becomes bit lane_id() of a sum, advanced by 128 bytes
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

// advance_crc returns a sum advanced by 128 bytes.
OW_DEV u32 advance_crc(u32 sum, u32 table) {
    u32 v = 0;
    OW_UNROLL(2)
    for (u32 k = 0; k < 8; k++, sum >>= 4) v ^= lds32(table + 64 * k + (sum & 15) * 4);
    return v;
}

// load_crc_word returns the word at p, with the bytes outside [begin, end) set to 0.
OW_DEV u32 load_crc_word(u64 p, u64 begin, u64 end) {
    if (p + 4 <= begin || p >= end) return 0;
    u32 w = ldg32((const u8*)(uintptr_t)p);
    if (p < begin) w &= 0xffffffff << (8 * (u32)(begin - p));
    if (p + 4 > end) w &= 0xffffffff >> (8 * (u32)(p + 4 - end));
    return w;
}

// sum_crc_part sums part `index`. `table` is the shared memory of this warp.
OW_DEV void sum_crc_part(const ow_crc_part* parts, u32* sums, u32 index, u32 table) {
    fill_crc_table(table);
    ow_crc_part part = parts[index];
    u64 begin = part.src, end = begin + part.bytes, stop = (end + 3) & ~(u64)3;
    u32 rows = (u32)(stop - begin + 127) / 128;
    u64 at = stop - 128 * (u64)rows + 4 * lane_id();
    u32 sum = 0;
    OW_UNROLL(1)
    for (u32 row = 0; row < rows; row += 4) {  // four loads in flight
        u32 w[4];
        OW_UNROLL(4)
        for (u32 k = 0; k < 4; k++, at += 128) w[k] = load_crc_word(at, begin, end);
        OW_UNROLL(4)
        for (u32 k = 0; k < 4; k++)
            if (row + k < rows) sum = advance_crc(sum, table) ^ w[k];
    }
    sum = multiply_crc(sum, kCrcWords.of[lane_id()]);
    OW_UNROLL(1)
    for (u32 d = 16; d > 0; d /= 2) sum ^= shfl(sum, lane_id() ^ d);
    sum = multiply_crc(sum, part.behind);
    if (lane_id() == 0) stg32((u8*)(sums + index), sum);
}

}  // namespace ow
#endif
