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

// lz4_more adds the bytes at `at` that continue a length. Returns 0 or a status.
OW_DEV u32 lz4_more(Feed& f, u32& at, u32& n, u32 most) {
    OW_UNROLL(1)
    for (;;) {
        u32 b = feed_peek(f, at);
        u32 last = ballot(at + lane() < f.end && b != 255);
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

// lz4_block decodes; out is how many bytes. Returns 0 or a status.
OW_DEV u32 lz4_block(Feed& f, u8* dst, u32 cap, u32& out) {
    out = 0;
    OW_UNROLL(1)
    for (u32 at = f.begin;;) {
        if (at >= f.end) return OW_BATCH_INPUT;
        u32 b = feed_peek(f, at), token = shfl(b, 0);
        u32 literals = token >> 4, match = token & 15, k = 1 + literals;
        at++;
        if (literals < 15) {
            if (literals > f.end - at) return OW_BATCH_INPUT;
            if (literals > cap - out) return OW_BATCH_ROOM;
            if (lane() - 1 < literals) put8(dst + out + lane() - 1, b);
            out += literals;
            at += literals;
            if (at == f.end) return 0;
        } else {
            u32 bad = lz4_more(f, at, literals, 1u << 31);
            if (bad) return OW_BATCH_INPUT;
            if (literals > f.end - at) return OW_BATCH_INPUT;
            if (literals > cap - out) return OW_BATCH_ROOM;
            if (literals <= 32) {
                b = feed_peek(f, at);
                if (lane() < literals) put8(dst + out + lane(), b);
            } else {
                copy_run<false>(dst + out, f.base + at, literals, f.base + f.begin, f.base + f.end);
            }
            out += literals;
            at += literals;
            if (at == f.end) return 0;
            b = feed_peek(f, at);
            k = 0;
        }
        if (f.end - at < 2) return OW_BATCH_INPUT;
        u32 back = shfl(b, k) | shfl(b, k + 1) << 8;
        at += 2;
        if (back == 0 || back > out) return OW_BATCH_OFFSET;
        u32 n = match + 4;
        if (match == 15) {
            u32 bad = lz4_more(f, at, n, cap);
            if (bad) return bad;
        }
        if (n > cap - out) return OW_BATCH_ROOM;
        copy_match(dst, out, cap, back, n);
        out += n;
    }
}

OW_DEV void lz4_job(ow_batch_item* items, u32 job, u32 ring) {
    ow_batch_item it = items[job];
    u32 status = OW_BATCH_ARG, out = 0;
    if (it.src_len >> 31 == 0 && it.dst_cap >> 31 == 0) {
        Feed f;
        feed_open(f, (const u8*)(uintptr_t)it.src, (u32)it.src_len, ring);
        status = lz4_block(f, (u8*)(uintptr_t)it.dst, (u32)it.dst_cap, out);
        feed_close();
    }
    batch_result(items + job, status, out);
}

}  // namespace ow
#endif
