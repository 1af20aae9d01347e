// Decodes LZ4 blocks, one warp per block.
//
//   sequence = token (u8: literals << 4 | match length - 4)
//              [length bytes of the literals: u8, 255 means more follow] literals
//              offset (u16) [length bytes of the match]
//
// The last sequence of a block ends after its literals.
#ifndef OVERWIRE_LZ4_DECODE_CUH
#define OVERWIRE_LZ4_DECODE_CUH

#include "lz.cuh"

namespace ow {

// lz4_add_length adds the length bytes at `at` to n. Returns 0 or a status.
OW_DEV u32 lz4_add_length(Feed& feed, u32& at, u32& n, u32 most) {
    OW_UNROLL(1)
    for (;;) {
        u32 byte = feed.peek(at);
        u32 last = ballot(at + lane_id() < feed.end && byte != 255);
        if (last) {
            u32 lane = lowest_bit(last);
            n += 255 * lane + shfl(byte, lane);
            at += lane + 1;
            return n > most ? OW_BATCH_ROOM : 0;
        }
        if (feed.end - at <= 32) return OW_BATCH_INPUT;
        n += 255 * 32;
        at += 32;
        if (n > most) return OW_BATCH_ROOM;
    }
}

OW_DEV u32 decode_lz4_block(Feed& feed, u8* dst, u32 cap, u32 table, u32& out);

struct Lz4 {
    static constexpr bool kBoth = true;
    OW_DEV Head head(u32 b, u32 lane_id) {
        u32 literals = b >> 4, match = (b & 15) + 4, size = literals + 3;
        return {size, literals, match, lane_id + 1 + literals, literals < 15 && match < 19 && lane_id + size <= 32};
    }
    OW_DEV u32 back(u32, u32 low, u32 high) { return low | high << 8; }
    OW_DEV u32 decode_block(Feed& feed, u8* dst, u32 cap, u32 table, u32& out) { return decode_lz4_block(feed, dst, cap, table, out); }
};

// decode_lz4_block decodes a block and sets `out` to the bytes written. Returns 0 or a status.
OW_DEV u32 decode_lz4_block(Feed& feed, u8* dst, u32 cap, u32 table, u32& out) {
    out = 0;
    u32 at = feed.begin;
    if (at >= feed.end) return OW_BATCH_INPUT;
    u8* mine = dst + feed.lane_id;
    u32 byte = feed.peek(at);
    OW_UNROLL(1)
    for (;;) {
        if (feed.end - at > kShortIn) {
            u32 bytes = try_short_sequences<Lz4>(feed, byte, at, dst, out, cap - out, table);
            if (bytes == kShortBad) return OW_BATCH_OFFSET;
            if (bytes) {
                out += bytes;
                byte = feed.peek(at);
                continue;
            }
        }
        u32 token = shfl(byte, 0), literals = token >> 4, match = (token & 15) + 4;
        at++;
        if (literals == 15) {
            u32 bad = lz4_add_length(feed, at, literals, 1u << 31);
            if (bad) return OW_BATCH_INPUT;
        }
        if (literals > feed.end - at) return OW_BATCH_INPUT;
        if (literals > cap - out) return OW_BATCH_ROOM;
        if (literals <= 32) {
            byte = feed.peek(at);
            if (feed.lane_id < literals) store_in_order8(mine + out, byte);
        } else {
            copy_disjoint<false>(dst + out, feed.base + at, literals, feed.base + feed.begin, feed.base + feed.end);
        }
        out += literals;
        at += literals;
        if (at == feed.end) return 0;
        if (feed.end - at < 2) return OW_BATCH_INPUT;
        byte = feed.peek(at);
        u32 back = shfl(byte, 0) | shfl(byte, 1) << 8;
        at += 2;
        if (back - 1 >= out) return OW_BATCH_OFFSET;
        if (match == 19) {
            u32 bad = lz4_add_length(feed, at, match, cap);
            if (bad) return bad;
        }
        if (match > cap - out) return OW_BATCH_ROOM;
        copy_match(dst, out, cap, back, match);
        out += match;
        if (at >= feed.end) return OW_BATCH_INPUT;
        byte = feed.peek(at);
    }
}

}  // namespace ow
#endif
