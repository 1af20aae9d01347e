// Decodes Snappy blocks, one warp per block.
//
//   block   = varint of the content length, elements
//   element = tag (u8), then the bytes of its kind, tag & 3:
//     0  n literals: n = (tag >> 2) + 1. If that is above 60, the next 1 to 4 bytes
//        contain n - 1.
//     1  match of (tag >> 2 & 7) + 4 bytes at offset (tag >> 5) << 8 | next byte
//     2  match of (tag >> 2) + 1 bytes at offset u16
//     3  match of (tag >> 2) + 1 bytes at offset u32
#ifndef OVERWIRE_SNAPPY_DECODE_CUH
#define OVERWIRE_SNAPPY_DECODE_CUH

#include "lz.cuh"

namespace ow {

// snappy_bytes_from_lane returns the n <= 4 bytes of a peek from `lane` on, little-endian.
OW_DEV u32 snappy_bytes_from_lane(u32 byte, u32 lane, u32 n) {
    u32 v = shfl(byte, lane) | shfl(byte, lane + 1) << 8 | shfl(byte, lane + 2) << 16 | shfl(byte, lane + 3) << 24;
    return n >= 4 ? v : v & ((1u << 8 * n) - 1);
}

OW_DEV u32 decode_snappy_block(Feed& feed, u8* dst, u32 cap, u32 table, u32& out);

struct Snappy {
    static constexpr bool kBoth = false;
    OW_DEV Head head(u32 b, u32 lane_id) {
        u32 kind = b & 3, n = (b >> 2) + 1, literals = kind ? 0 : n, match = kind == 1 ? (b >> 2 & 7) + 4 : n - literals;
        return {kind + 1 + literals, literals, match, lane_id + 1, kind ? kind < 3 && lane_id + kind < 32 : n <= 60};
    }
    OW_DEV u32 back(u32 b, u32 low, u32 high) { return low | ((b & 3) == 1 ? b >> 5 : high) << 8; }
    OW_DEV u32 decode_block(Feed& feed, u8* dst, u32 cap, u32 table, u32& out) { return decode_snappy_block(feed, dst, cap, table, out); }
};

// decode_snappy_block decodes a block and sets `out` to the bytes written. Returns 0 or a status.
OW_DEV u32 decode_snappy_block(Feed& feed, u8* dst, u32 cap, u32 table, u32& out) {
    out = 0;
    u32 at = feed.begin, byte = feed.peek(at);
    u32 last = ballot(at + lane_id() < feed.end && byte < 128 && lane_id() < 5);
    if (!last) return OW_BATCH_INPUT;
    u32 last_lane = lowest_bit(last);
    u64 content = 0;
    for (u32 i = 0; i < 5; i++) {
        u32 v = shfl(byte, i) & 127;
        if (i <= last_lane) content |= (u64)v << (7 * i);
    }
    if (content >> 32) return OW_BATCH_INPUT;
    if (content > cap) return OW_BATCH_ROOM;
    // The elements must produce exactly `size` bytes.
    u32 size = (u32)content;
    at += last_lane + 1;
    byte = feed.peek(at);
    OW_UNROLL(1)
    while (at < feed.end) {
        if (feed.end - at > kShortIn) {
            u32 bytes = try_short_sequences<Snappy>(feed, byte, at, dst, out, size - out, table);
            if (bytes == kShortBad) return OW_BATCH_OFFSET;
            if (bytes) {
                out += bytes;
                byte = feed.peek(at);
                continue;
            }
        }
        u32 tag = shfl(byte, 0), kind = tag & 3, n = (tag >> 2) + 1;
        u32 rest = feed.end - ++at;
        if (kind == 0) {
            if (n > 60) {
                u32 extra = n - 60;
                if (extra > rest) return OW_BATCH_INPUT;
                n = snappy_bytes_from_lane(byte, 1, extra) + 1;
                at += extra;
                rest -= extra;
            }
            if (n == 0 || n > rest || n > size - out) return OW_BATCH_INPUT;
            copy_disjoint<false>(dst + out, feed.base + at, n, feed.base + feed.begin, feed.base + feed.end);
            at += n;
        } else {
            u32 back, extra = kind == 3 ? 4 : kind;
            if (extra > rest) return OW_BATCH_INPUT;
            if (kind == 1) {
                n = (tag >> 2 & 7) + 4;
                back = tag >> 5 << 8 | shfl(byte, 1);
            } else {
                back = snappy_bytes_from_lane(byte, 1, extra);
            }
            at += extra;
            if (back - 1 >= out) return OW_BATCH_OFFSET;
            if (n > size - out) return OW_BATCH_INPUT;
            copy_match(dst, out, cap, back, n);
        }
        out += n;
        byte = feed.peek(at);
    }
    return out == size ? 0 : OW_BATCH_INPUT;
}

}  // namespace ow
#endif
