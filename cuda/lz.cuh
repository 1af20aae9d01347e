// What the decoders of LZ4 and Snappy share: the input as it comes through
// shared memory, and the two ways to make output, from the input and from the
// output itself.
//
// One warp decodes one chunk. All lanes know where input and output stand; each
// looks at its own byte of the next 32 of the input, so that an element's head,
// and its literals if they are few, come with one load.
#ifndef OVERWIRE_LZ_CUH
#define OVERWIRE_LZ_CUH

#include "abi_batch.h"
#include "warp.cuh"

namespace ow {

constexpr u32 kFeedBlock = 512, kFeedRing = 2 * kFeedBlock, kFeedAhead = 64;

// A Feed is the input on its way through a ring of two blocks in shared memory.
// Offsets count from `base`, which is `src` rounded down to 16.
struct Feed {
    const u8* base;
    u32 begin, end;  // of the input
    u32 ring;        // shared address, a multiple of kFeedRing
    u32 have;        // bytes before this, a multiple of a block, have been asked for; + 1: the last block is on its way
    u32 mark;        // from here on feed_serve has something to do
};

// feed_issue asks for the block at `at`. What of it lies outside the input is
// neither read nor written.
OW_DEV void feed_issue(const u8* base, u32 begin, u32 end, u32 ring, u32 at) {
    at += 16 * lane();
    u32 to = ring | (at & (kFeedRing - 1));
    if (at >= begin && at + 16 <= end) {
        copy16(to, base + at);
        return;
    }
    OW_UNROLL(1)
    for (u32 i = 0; i < 16; i++) {
        if (at + i >= begin && at + i < end) sts8(to + i, ldg8(base + at + i));
    }
}

// feed_serve sees to it that the bytes [at, at + kFeedAhead) of the input are in
// the ring, and that the block behind them is on its way. It returns what the
// Feed then has.
OW_COLD u32 feed_serve(const u8* base, u32 begin, u32 end, u32 ring, u32 have, u32 at) {
    u32 issued = have & ~1u, landed = have & 1 ? issued - kFeedBlock : issued;
    if (at >= issued) {  // jumped over what is there
        copy_wait();
        landed = issued = at & ~(kFeedBlock - 1);
    }
    syncwarp();  // every lane is done with the block that goes
    OW_UNROLL(1)
    for (;;) {
        if (at + kFeedAhead > landed && landed < issued) {
            copy_wait();
            landed = issued;
        } else if (issued < end && at + kFeedBlock >= issued) {
            feed_issue(base, begin, end, ring, issued);
            issued += kFeedBlock;
        } else {
            break;
        }
    }
    syncwarp();
    return issued | (landed < issued);
}

OW_DEV void feed_open(Feed& f, const u8* src, u32 n, u32 ring) {
    f.begin = (u32)((uintptr_t)src & 15);
    f.base = src - f.begin;
    f.end = f.begin + n;
    f.ring = ring;
    f.have = 0;
    f.mark = 0;
}

// feed_peek gives each lane its byte of the next 32; past the end, rubbish.
OW_DEV u32 feed_peek(Feed& f, u32 at) {
    if (at >= f.mark) {
        f.have = feed_serve(f.base, f.begin, f.end, f.ring, f.have, at);
        // What is on its way is waited for before it is looked at; the next
        // block is asked for when the one before the last is done with.
        if (f.have & 1) f.mark = f.have - 1 - kFeedBlock - (kFeedAhead - 1);
        else f.mark = f.have < f.end ? f.have - kFeedBlock : ~0u;
    }
    return lds8(f.ring | ((at + lane()) & (kFeedRing - 1)));
}

// feed_close waits for what is on its way, after which the ring may be reused.
OW_DEV void feed_close() {
    copy_wait();
    syncwarp();
}

// copy_run copies n bytes that do not overlap; `self`: out of what this warp has
// written. Reads stay inside [lo, hi), which holds the source.
template <bool SELF> OW_DEV u32 load8(const u8* p) { return SELF ? again8(p) : ldg8(p); }
template <bool SELF> OW_DEV u32 load32(const u8* p) { return SELF ? again32(p) : ldg32(p); }

// copy_long copies more than 64 bytes: words of the destination, each out of one
// or two words of the source; what is left at both ends, at most 7 bytes,
// singly.
template <bool SELF> OW_COLD void copy_long(u8* to, const u8* from, u32 n, const u8* lo, const u8* hi) {
    u32 head = (0u - (u32)(uintptr_t)to) & 3, off = (u32)(uintptr_t)(from + head) & 3;
    if (off && from + head < lo + off) head += 4;
    u32 words = (n - head) / 4;
    const u8* s = from + head - off;
    if (off) {
        u64 whole = (u64)(hi - s) / 4 - 1;
        if (words > whole) words = (u32)whole;
    }
    u32 tail = n - head - 4 * words;
    if (lane() < 16) {
        if (lane() < head) put8(to + lane(), load8<SELF>(from + lane()));
    } else if (lane() - 16 < tail) {
        u32 i = n - tail + lane() - 16;
        put8(to + i, load8<SELF>(from + i));
    }
    u8* d = to + head;
    u32 sel = 0x3210 + 0x1111 * off, i = lane();
    OW_UNROLL(1)
    for (; i + 96 < words; i += 128) {
        u32 v[4];
    OW_UNROLL(4)
        for (u32 k = 0; k < 4; k++) {
            v[k] = load32<SELF>(s + 4 * (u64)(i + 32 * k));
            if (off) v[k] = prmt(v[k], load32<SELF>(s + 4 * (u64)(i + 32 * k) + 4), sel);
        }
    OW_UNROLL(4)
        for (u32 k = 0; k < 4; k++) put32(d + 4 * (u64)(i + 32 * k), v[k]);
    }
    OW_UNROLL(1)
    for (; i < words; i += 32) {
        u32 v = load32<SELF>(s + 4 * (u64)i);
        if (off) v = prmt(v, load32<SELF>(s + 4 * (u64)i + 4), sel);
        put32(d + 4 * (u64)i, v);
    }
}

template <bool SELF> OW_DEV void copy_run(u8* to, const u8* from, u32 n, const u8* lo, const u8* hi) {
    if (n > 64) {
        copy_long<SELF>(to, from, n, lo, hi);
    } else if (lane() < n) {
        u32 a = load8<SELF>(from + lane()), b = 0;
        if (lane() + 32 < n) b = load8<SELF>(from + lane() + 32);
        put8(to + lane(), a);
        if (lane() + 32 < n) put8(to + lane() + 32, b);
    }
}

// copy_again repeats more than 32 bytes that are `back` < n apart. From the
// first byte of the match on, the output has period `back`: each round copies as
// many whole periods as there are.
OW_COLD void copy_again(u8* to, u32 back, u32 n, const u8* lo, const u8* hi) {
    u32 done = 0;
    if (back < 32) {
        put8(to + lane(), again8(to - back + lane() % back));
        done = 32;
        syncwarp();
    }
    OW_UNROLL(1)
    while (done < n) {
        u32 whole = (back + done) / back * back, part = umin(whole, n - done);
        copy_run<true>(to + done, to + done - whole, part, lo, hi);
        done += part;
        syncwarp();
    }
}

// copy_match repeats n bytes from `back` before dst + out; 0 < back <= out, and
// out + n <= cap. What is nearer than n repeats itself.
OW_DEV void copy_match(u8* dst, u32 out, u32 cap, u32 back, u32 n) {
    u8* to = dst + out;
    const u8* from = to - back;
    syncwarp();  // the bytes before are there
    if (n <= 32) {
        if (lane() < n) put8(to + lane(), again8(from + (back < n ? lane() % back : lane())));
        return;
    }
    if (back >= n) copy_run<true>(to, from, n, dst, dst + cap);
    else copy_again(to, back, n, dst, dst + cap);
}

// batch_result writes what became of an item.
OW_DEV void batch_result(ow_batch_item* item, u32 status, u64 written) {
    if (lane() == 0) {
        item->written = status ? 0 : written;
        item->status = status;
    }
}

}  // namespace ow
#endif
