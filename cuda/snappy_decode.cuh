// Snappy blocks: one warp decodes one block.
//
//   block   = varint of the content's length, elements
//   element = tag (u8); tag & 3 says which:
//     0  literals: (tag >> 2) + 1, or if that is above 60 the 1 to 4 bytes behind
//        the tag, + 1
//     1  a copy of (tag >> 2 & 7) + 4 from (tag >> 5) << 8 | next byte back
//     2  a copy of (tag >> 2) + 1 from u16 back
//     3  likewise from u32 back
#ifndef OVERWIRE_SNAPPY_DECODE_CUH
#define OVERWIRE_SNAPPY_DECODE_CUH

#include "lz.cuh"

namespace ow {

// snappy_word is the n <= 4 bytes from lane k of a peek.
OW_DEV u32 snappy_word(u32 b, u32 k, u32 n) {
    u32 v = shfl(b, k) | shfl(b, k + 1) << 8 | shfl(b, k + 2) << 16 | shfl(b, k + 3) << 24;
    return n >= 4 ? v : v & ((1u << 8 * n) - 1);
}

// snappy_block decodes; out is how many bytes. Returns 0 or a status.
OW_DEV u32 snappy_block(Feed& f, u8* dst, u32 cap, u32& out) {
    out = 0;
    u32 at = f.begin, b = feed_peek(f, at);
    u32 last = ballot(at + lane() < f.end && b < 128 && lane() < 5);
    if (!last) return OW_BATCH_INPUT;
    u32 k = lowest(last);
    u64 said = 0;
    for (u32 i = 0; i < 5; i++) {
        u32 v = shfl(b, i) & 127;
        if (i <= k) said |= (u64)v << (7 * i);
    }
    if (said >> 32) return OW_BATCH_INPUT;
    if (said > cap) return OW_BATCH_ROOM;
    // What follows may make as many bytes as were said, and must.
    u32 size = (u32)said;
    OW_UNROLL(1)
    for (at += k + 1; at < f.end;) {
        b = feed_peek(f, at);
        u32 tag = shfl(b, 0), kind = tag & 3, n = (tag >> 2) + 1, rest = f.end - ++at;
        if (kind == 0) {
            if (n > 60) {
                u32 extra = n - 60;
                if (extra > rest) return OW_BATCH_INPUT;
                n = snappy_word(b, 1, extra) + 1;
                at += extra;
                rest -= extra;
                if (n == 0 || n > rest) return OW_BATCH_INPUT;
                if (n > size - out) return OW_BATCH_INPUT;
                copy_run<false>(dst + out, f.base + at, n, f.base + f.begin, f.base + f.end);
            } else {
                if (n > rest || n > size - out) return OW_BATCH_INPUT;
                if (lane() - 1 < n) put8(dst + out + lane() - 1, b);
                if (n > 31) {
                    b = lds8(f.ring | ((at + 31 + lane()) & (kFeedRing - 1)));
                    if (31 + lane() < n) put8(dst + out + 31 + lane(), b);
                }
            }
            out += n;
            at += n;
            continue;
        }
        u32 back, extra = kind == 3 ? 4 : kind;
        if (extra > rest) return OW_BATCH_INPUT;
        if (kind == 1) {
            n = (tag >> 2 & 7) + 4;
            back = (tag >> 5) << 8 | shfl(b, 1);
        } else if (kind == 2) {
            back = shfl(b, 1) | shfl(b, 2) << 8;
        } else {
            back = snappy_word(b, 1, 4);
        }
        at += extra;
        if (back == 0 || back > out) return OW_BATCH_OFFSET;
        if (n > size - out) return OW_BATCH_INPUT;
        copy_match(dst, out, cap, back, n);
        out += n;
    }
    return out == size ? 0 : OW_BATCH_INPUT;
}

OW_DEV void snappy_job(ow_batch_item* items, u32 job, u32 ring) {
    ow_batch_item it = items[job];
    u32 status = OW_BATCH_ARG, out = 0;
    if (it.src_len >> 31 == 0 && it.dst_cap >> 31 == 0) {
        Feed f;
        feed_open(f, (const u8*)(uintptr_t)it.src, (u32)it.src_len, ring);
        status = snappy_block(f, (u8*)(uintptr_t)it.dst, (u32)it.dst_cap, out);
        feed_close();
    }
    batch_result(items + job, status, out);
}

}  // namespace ow
#endif
