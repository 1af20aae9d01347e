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
    u32 lane;
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
    f.ring = keep(ring);
    f.lane = keep(lane());
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
    return lds8(f.ring | ((at + f.lane) & (kFeedRing - 1)));
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

// Short elements are decoded many at a time: all that begin in the next 32 bytes
// of input, end there, and make no more than 64 bytes of output. Each lane reads
// the byte it sees as the head of an element; which lanes are right is found by
// doubling jumps from the first. Then each lane makes two bytes of the output:
// out of a literal, of what was decoded before, or, where a match reaches into
// these 64 bytes themselves, of the byte at the end of its chain of matches.

// A Head is an element as its first byte says it: bytes it takes (0: not a short
// one), literals and match bytes it makes, and the lane of its offset's bytes.
struct Head { u32 size, literals, match, back_at; };

constexpr u32 kShortIn = 32, kShortOut = 64;
// A Format has head and back, which reads an offset out of a head and two bytes;
// kRounds: up to 2^kRounds elements at a time, 16 at most.
// Shared bytes of a warp beside the ring: the elements of two batches.
constexpr u32 kShortTable = 2 * 16 * 8;

// A Batch is 64 bytes of output on their way.
struct Batch {
    u32 v[2];    // the lane's bytes, p = lane and 32 + lane
    int src[2];  // where a match takes them from, if that is in the batch; else negative
    u32 n;
};

// short_batch decodes what begins at `at`, where b is the lane's peek, as far as
// elements are short; n = 0: the first is not. It advances `at`, not `out`.
// `table` is the shared table, changed with each batch. bad: an offset reaches
// back too far. The caller has seen to it that 64 bytes of input and room for 64
// of output are left.
template <class Format>
OW_DEV Batch short_batch(const Feed& f, u32 b, u32& at, u32 out, const u8* mine, u32& table, bool& bad) {
    Head h = Format::head(b, f.lane);
    bool is = h.size > 0 && f.lane + h.size <= kShortIn;
    // The lanes where elements begin: after each round those that are twice as
    // many jumps from lane 0.
    u32 jump = is ? f.lane + h.size : 32, seen = 1, me = bit(f.lane);
    OW_UNROLL(4)
    for (u32 i = 0; i < Format::kRounds; i++) {
        seen |= any_or(seen & me ? bit(jump) : 0);
        u32 next = shfl(jump, jump & 31);
        if (jump < 32) jump = next;
    }
    is = is && (seen & me);
    u32 made = is ? h.literals + h.match : 0, end = scan(made), start = end - made;
    is = is && end <= kShortOut;
    u32 heads = ballot(is);
    Batch r;
    r.n = 0;
    bad = false;
    if (!heads) return r;
    u32 last = highest(heads);
    r.n = shfl(end, last);
    at += shfl(f.lane + h.size, last);
    u32 low = shfl(b, h.back_at), back = Format::back(b, low, shfl(b, h.back_at + 1));
    bad = ballot(is && h.match && back - 1 >= out + start + h.literals) != 0;
    if (bad) return r;
    u32 starts[2] = {any_or(is ? bit(start) : 0), any_or(is ? bit(start - 32) : 0)};
    table ^= kShortTable / 2;
    if (is) sts64(table + 8 * popc(heads & (me - 1)), {start | h.literals << 8 | (f.lane + 1) << 16, back});
    syncwarp();  // and the bytes before are there
    u32 upto = me | (me - 1), before = 0;
    OW_UNROLL(2)
    for (u32 k = 0; k < 2; k++) {
        r.v[k] = 0;
        r.src[k] = -1;
        if (k && r.n <= 32) break;
        u32 p = f.lane + 32 * k;
        u32x2 e = lds64(table + 8 * (before + popc(starts[k] & upto) - 1));
        u32 in = p - (e.x & 255);  // place in the element
        u32 literal = shfl(b, (e.x >> 16) + in);
        int from = (int)(p - e.y);
        bool match = in >= (e.x >> 8 & 255) && p < r.n;
        u32 old = 0;
        if (match && from < 0) old = again8(mine + (int)(out - e.y + 32 * k));
        r.v[k] = match ? old : literal;
        r.src[k] = match ? from : -1;
        before += popc(starts[k]);
    }
    return r;
}

// short_store puts a batch down.
OW_DEV void short_store(const Feed& f, u8* mine, u32 out, Batch& r) {
    if (ballot(r.src[0] >= 0 || r.src[1] >= 0)) {
        // Jumps double here too, until they end at bytes that are known.
        u32 a = r.src[0] >= 0 ? (u32)r.src[0] : f.lane, c = r.src[1] >= 0 ? (u32)r.src[1] : f.lane + 32;
        OW_UNROLL(1)
        for (;;) {
            u32 a0 = shfl(a, a & 31), a1 = shfl(c, a & 31), c0 = shfl(a, c & 31), c1 = shfl(c, c & 31);
            u32 na = a & 32 ? a1 : a0, nc = c & 32 ? c1 : c0;
            if (!ballot(na != a || nc != c)) break;
            a = na;
            c = nc;
        }
        u32 a0 = shfl(r.v[0], a & 31), a1 = shfl(r.v[1], a & 31), c0 = shfl(r.v[0], c & 31), c1 = shfl(r.v[1], c & 31);
        r.v[0] = a & 32 ? a1 : a0;
        r.v[1] = c & 32 ? c1 : c0;
    }
    if (f.lane < r.n) put8(mine + out, r.v[0]);
    if (f.lane + 32 < r.n) put8(mine + out + 32, r.v[1]);
}

// The shared memory of a block's warp `warp`: rings first, each at a multiple of
// its size, then tables.
struct LzPlace { u32 ring, table; };
constexpr u32 kLzShared = OW_BATCH_WARPS * (kFeedRing + kShortTable);
OW_DEV LzPlace lz_place(u32 base, u32 warp) {
    return {base + warp * kFeedRing, base + OW_BATCH_WARPS * kFeedRing + warp * kShortTable};
}

// batch_result writes what became of an item.
OW_DEV void batch_result(ow_batch_item* item, u32 status, u64 written) {
    if (lane() == 0) {
        item->written = status ? 0 : written;
        item->status = status;
    }
}

// lz_job decodes an item of a format.
template <class Format> OW_DEV void lz_job(ow_batch_item* items, u32 job, u32 base, u32 warp) {
    LzPlace place = lz_place(base, warp);
    ow_batch_item it = items[job];
    u32 status = OW_BATCH_ARG, out = 0;
    if (it.src_len >> 31 == 0 && it.dst_cap >> 31 == 0) {
        Feed f;
        feed_open(f, (const u8*)(uintptr_t)it.src, (u32)it.src_len, place.ring);
        status = Format::block(f, (u8*)(uintptr_t)it.dst, (u32)it.dst_cap, keep(place.table), out);
        feed_close();
    }
    batch_result(items + job, status, out);
}

}  // namespace ow
#endif
