// LZ4 blocks: one warp decodes one block.
//
//   sequence = token (u8: literals << 4 | match length - 4)
//              [more literals: u8 each, 255 goes on] literals
//              offset (u16) [more match length]
//
// The last sequence ends after its literals, and with it the block.
#ifndef OVERWIRE_LZ4_DECODE_CUH
#define OVERWIRE_LZ4_DECODE_CUH

#include "lz.cuh"

namespace ow {

// lz4_add_length adds the bytes at `at` that continue a length. Returns 0 or a status.
OW_DEV u32 lz4_add_length(Feed& f, u32& at, u32& n, u32 most) {
    OW_UNROLL(1)
    for (;;) {
        u32 b = f.peek(at);
        u32 last = ballot(at + lane_id() < f.end && b != 255);
        if (last) {
            u32 k = lowest(last);
            n += 255 * k + shfl(b, k);
            at += k + 1;
            return n > most ? OW_BATCH_ROOM : 0;
        }
        if (f.end - at <= 32) return OW_BATCH_INPUT;
        n += 255 * 32;
        at += 32;
        if (n > most) return OW_BATCH_ROOM;
    }
}

OW_DEV u32 lz4_block(Feed& f, u8* dst, u32 cap, u32 table, u32& out);

struct Lz4 {
    static constexpr bool kBoth = true;
    OW_DEV Head head(u32 b, u32 lane_id) {
        u32 literals = b >> 4, match = (b & 15) + 4, size = literals + 3;
        return {size, literals, match, lane_id + 1 + literals, literals < 15 && match < 19 && lane_id + size <= 32};
    }
    OW_DEV u32 back(u32, u32 low, u32 high) { return low | high << 8; }
    OW_DEV u32 block(Feed& f, u8* dst, u32 cap, u32 table, u32& out) { return lz4_block(f, dst, cap, table, out); }
};

// lz4_block decodes a block to `out` bytes. Returns 0 or a status.
OW_DEV u32 lz4_block(Feed& f, u8* dst, u32 cap, u32 table, u32& out) {
    out = 0;
    u32 at = f.begin;
    if (at >= f.end) return OW_BATCH_INPUT;
    u8* mine = dst + f.lane_id;
    u32 b = f.peek(at);
    OW_UNROLL(1)
    for (;;) {
        if (f.end - at > kShortIn) {
            u32 bytes = try_short_sequences<Lz4>(f, b, at, dst, out, cap - out, table);
            if (bytes == kShortBad) return OW_BATCH_OFFSET;
            if (bytes) {
                out += bytes;
                b = f.peek(at);
                continue;
            }
        }
        u32 token = shfl(b, 0), literals = token >> 4, n = (token & 15) + 4;
        at++;
        if (literals == 15) {
            u32 bad = lz4_add_length(f, at, literals, 1u << 31);
            if (bad) return OW_BATCH_INPUT;
        }
        if (literals > f.end - at) return OW_BATCH_INPUT;
        if (literals > cap - out) return OW_BATCH_ROOM;
        if (literals <= 32) {
            b = f.peek(at);
            if (f.lane_id < literals) store_in_order8(mine + out, b);
        } else {
            copy_run<false>(dst + out, f.base + at, literals, f.base + f.begin, f.base + f.end);
        }
        out += literals;
        at += literals;
        if (at == f.end) return 0;
        if (f.end - at < 2) return OW_BATCH_INPUT;
        b = f.peek(at);
        u32 back = shfl(b, 0) | shfl(b, 1) << 8;
        at += 2;
        if (back - 1 >= out) return OW_BATCH_OFFSET;
        if (n == 19) {
            u32 bad = lz4_add_length(f, at, n, cap);
            if (bad) return bad;
        }
        if (n > cap - out) return OW_BATCH_ROOM;
        copy_match(dst, out, cap, back, n);
        out += n;
        if (at >= f.end) return OW_BATCH_INPUT;
        b = f.peek(at);
    }
}

}  // namespace ow
#endif
