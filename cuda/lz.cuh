// What the decoders of LZ4 and Snappy share: the input, which comes through shared
// memory, and the two ways to make output, from the input and from earlier output.
//
// One warp decodes one chunk. All lanes know the positions in input and output;
// each looks at its own byte of the next 32 of the input, so that one load brings
// an element's head, and its literals if they are few.
#ifndef OVERWIRE_LZ_CUH
#define OVERWIRE_LZ_CUH

#include "abi_batch.h"
#include "warp.cuh"

namespace ow {

constexpr u32 kFeedBlock = 512, kFeedRing = 2 * kFeedBlock, kFeedAhead = 64;

// request_block requests the block at `at`. What of it is outside the input is neither
// read nor written.
OW_DEV void request_block(const u8* base, u32 begin, u32 end, u32 ring, u32 at) {
    at += 16 * lane_id();
    u32 to = ring | (at & (kFeedRing - 1));
    if (at >= begin && at + 16 <= end) {
        copy_async16(to, base + at);
        return;
    }
    OW_UNROLL(1)
    for (u32 i = 0; i < 16; i++) {
        if (at + i >= begin && at + i < end) sts8(to + i, ldg8(base + at + i));
    }
}

// feed_serve makes sure that the bytes [at, at + kFeedAhead) of the input are in
// the ring, and that the next block is on its way. It returns the Feed's new state.
OW_COLD u32 feed_serve(const u8* base, u32 begin, u32 end, u32 ring, u32 have, u32 at) {
    u32 issued = have & ~1u, landed = have & 1 ? issued - kFeedBlock : issued;
    if (at >= issued) {  // jumped beyond the ring
        wait_for_copies();
        landed = issued = at & ~(kFeedBlock - 1);
    }
    syncwarp();  // every lane is done with the block that is replaced
    OW_UNROLL(1)
    for (;;) {
        if (at + kFeedAhead > landed && landed < issued) {
            wait_for_copies();
            landed = issued;
        } else if (issued < end && at + kFeedBlock >= issued) {
            request_block(base, begin, end, ring, issued);
            issued += kFeedBlock;
        } else {
            break;
        }
    }
    syncwarp();
    return issued | (landed < issued);
}

// A Feed is the input in a ring of two blocks in shared memory. Offsets count from
// `base`, which is `src` rounded down to 16.
struct Feed {
    const u8* base;
    u32 begin, end;  // of the input
    u32 ring;        // shared address, a multiple of kFeedRing
    u32 lane_id;     // in a register
    u32 have;        // bytes before this, a multiple of a block, have been asked for; + 1: the last block is on its way
    u32 mark;        // from here on peek calls feed_serve

    OW_METHOD Feed(const u8* src, u32 n, u32 to) {
        begin = (u32)((uintptr_t)src & 15);
        base = src - begin;
        end = begin + n;
        ring = keep_in_register(to);
        lane_id = keep_in_register(ow::lane_id());
        have = 0;
        mark = 0;
    }

    // peek gives each lane its byte of the next 32; past the end, rubbish.
    OW_METHOD u32 peek(u32 at) {
        if (at >= mark) {
            have = feed_serve(base, begin, end, ring, have, at);
            // Wait for a block before it is read; request the next one when the last
            // but one is no longer needed.
            if (have & 1) mark = have - 1 - kFeedBlock - (kFeedAhead - 1);
            else mark = have < end ? have - kFeedBlock : ~0u;
        }
        return lds8(ring | ((at + lane_id) & (kFeedRing - 1)));
    }

    // close waits for what is on its way, after which the ring may be reused.
    OW_METHOD void close() const {
        wait_for_copies();
        syncwarp();
    }
};

template <bool SELF> OW_DEV u32 load8(const u8* p) { return SELF ? reload8(p) : ldg8(p); }
template <bool SELF> OW_DEV u32 load32(const u8* p) { return SELF ? reload32(p) : ldg32(p); }

// copy_long copies more than 64 bytes: words of the destination, each from one or
// two words of the source; the rest at both ends, at most 7 bytes, singly.
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
    if (lane_id() < 16) {
        if (lane_id() < head) store_in_order8(to + lane_id(), load8<SELF>(from + lane_id()));
    } else if (lane_id() - 16 < tail) {
        u32 i = n - tail + lane_id() - 16;
        store_in_order8(to + i, load8<SELF>(from + i));
    }
    u8* d = to + head;
    u32 sel = 0x3210 + 0x1111 * off, i = lane_id();
    OW_UNROLL(1)
    for (; i + 96 < words; i += 128) {
        u32 v[4];
        OW_UNROLL(4)
        for (u32 k = 0; k < 4; k++) {
            v[k] = load32<SELF>(s + 4 * (u64)(i + 32 * k));
            if (off) v[k] = prmt(v[k], load32<SELF>(s + 4 * (u64)(i + 32 * k) + 4), sel);
        }
        OW_UNROLL(4)
        for (u32 k = 0; k < 4; k++) store_in_order32(d + 4 * (u64)(i + 32 * k), v[k]);
    }
    OW_UNROLL(1)
    for (; i < words; i += 32) {
        u32 v = load32<SELF>(s + 4 * (u64)i);
        if (off) v = prmt(v, load32<SELF>(s + 4 * (u64)i + 4), sel);
        store_in_order32(d + 4 * (u64)i, v);
    }
}

// copy_disjoint copies n bytes that do not overlap; SELF: the source is output of this
// warp. Reads stay inside [lo, hi), which contains the source.
template <bool SELF> OW_DEV void copy_disjoint(u8* to, const u8* from, u32 n, const u8* lo, const u8* hi) {
    if (n > 64) {
        copy_long<SELF>(to, from, n, lo, hi);
    } else if (lane_id() < n) {
        u32 a = load8<SELF>(from + lane_id()), b = 0;
        if (lane_id() + 32 < n) b = load8<SELF>(from + lane_id() + 32);
        store_in_order8(to + lane_id(), a);
        if (lane_id() + 32 < n) store_in_order8(to + lane_id() + 32, b);
    }
}

// copy_again repeats more than 32 bytes from `back` < n bytes before. From the
// first byte of the match on, the output has period `back`: each round copies as
// many whole periods as there are.
OW_COLD void copy_again(u8* to, u32 back, u32 n, const u8* lo, const u8* hi) {
    u32 done = 0;
    if (back < 32) {
        store_in_order8(to + lane_id(), reload8(to - back + lane_id() % back));
        done = 32;
        syncwarp();
    }
    OW_UNROLL(1)
    while (done < n) {
        u32 whole = (back + done) / back * back, part = umin(whole, n - done);
        copy_disjoint<true>(to + done, to + done - whole, part, lo, hi);
        done += part;
        syncwarp();
    }
}

// copy_match repeats n bytes from `back` before dst + out; 0 < back <= out, and out
// + n <= cap. If back < n, the bytes repeat themselves.
OW_DEV void copy_match(u8* dst, u32 out, u32 cap, u32 back, u32 n) {
    u8* to = dst + out;
    const u8* from = to - back;
    syncwarp();  // the bytes before are there
    if (n <= 32) {
        if (lane_id() < n) store_in_order8(to + lane_id(), reload8(from + (back < n ? lane_id() % back : lane_id())));
        return;
    }
    if (back >= n) copy_disjoint<true>(to, from, n, dst, dst + cap);
    else copy_again(to, back, n, dst, dst + cap);
}

// Short elements are decoded many at a time: those that begin in the next 32 bytes
// of input. Each lane reads the byte it sees as the head of an element. By jumps
// that double, a lane learns which elements follow its own, and how many bytes they
// make together. The elements that follow lane 0's are the real ones, and what is
// left to make says where each begins in the output.
//
// Literals, and matches of output that is complete, are copied four at a time, from
// a table in shared memory with an entry for each. If a match refers to output of
// these elements themselves, each lane instead makes two bytes of the next 64, if
// necessary at the end of a chain of matches.

// A Head is an element as its first byte describes it: how many input bytes it has,
// how many literals and match bytes it makes, the lane of its offset's bytes, and
// whether it is a short one whose head (of LZ4: the whole) ends in the 32 bytes.
struct Head { u32 size, literals, match, back_at; bool is; };

// How much input and output must be left: an element may begin with the last of the
// 32 bytes and have 60 literals.
constexpr u32 kShortIn = 96, kShortOut = 64;
// Parts of at most 16 elements and an empty group of four. A Format has head, back,
// which reads an offset from a head and two bytes, and kBoth: an element may have
// both literals and a match.
constexpr u32 kShortTable = 24 * 16;

// copy_short_parts copies parts of at most 8 * N bytes that do not depend on each
// other. An entry has an address, a length, and an offset behind `to`. Eight lanes
// take one part, so four are made at a time. Empty entries follow, up to a multiple
// of four.
template <u32 N> OW_DEV void copy_short_parts(u8* to, u32 table, u32 parts) {
    u32 column = lane_id() & 7, at = table + 2 * (lane_id() - column), end = at + 16 * parts;
    to += column;
    OW_UNROLL(1)
    for (; at < end; at += 64) {
        u32x4 e = lds128(at);
        const u8* from = (const u8*)(uintptr_t)(((u64)e.y << 32 | e.x) + column);
        u8* place = to + e.w;
        int n = (int)(e.z - column);
        if (N == 2) copy_bytes_0_8(place, from, n);
        else copy_bytes_0_8_16_24(place, from, n);
        if (N == 8) copy_bytes_0_8_16_24(place + 32, from + 32, n - 32);
    }
}

// write_dependent_elements makes the bytes of elements that depend on each other: those of
// `heads`, which end in the 32 bytes of a peek and make n <= 64. is: the lane is one of
// them.
OW_DEV void write_dependent_elements(const Feed& feed, const Head& element, u32 byte, u32 heads, bool is, u32 start, u32 back, u32 n, u8* to, u32 table) {
    u32 me = bit(feed.lane_id), upto = me | (me - 1), before = 0;
    u32 starts[2] = {or_of_lanes(is ? bit(start) : 0), or_of_lanes(is ? bit(start - 32) : 0)};
    syncwarp();  // the table's last entries were read
    if (is) sts64(table + 8 * popc(heads & (me - 1)), {start | element.literals << 8 | (feed.lane_id + 1) << 16, back});
    syncwarp();  // and the bytes before are there
    u32 v[2], at[2];  // the lane's bytes, p = lane and 32 + lane, and where they are known
    OW_UNROLL(2)
    for (u32 k = 0; k < 2; k++) {
        u32 p = feed.lane_id + 32 * k;
        u32x2 e = lds64(table + 8 * (before + popc(starts[k] & upto) - 1));
        u32 in = p - (e.x & 255);  // place in the element
        v[k] = shfl(byte, (e.x >> 16) + in);
        at[k] = p;
        if (in >= (e.x >> 8 & 255) && p < n) {
            if (p < e.y) v[k] = reload8(to + ((int)(32 * k) - (int)e.y));
            else at[k] = p - e.y;
        }
        before += popc(starts[k]);
    }
    // Jumps double here too, until they end at bytes that are known.
    u32 x = at[0], y = at[1];
    OW_UNROLL(1)
    while (ballot(x != feed.lane_id || y != feed.lane_id + 32)) {
        u32 x0 = shfl(x, x), x1 = shfl(y, x), y0 = shfl(x, y), y1 = shfl(y, y);
        u32 nx = x & 32 ? x1 : x0, ny = y & 32 ? y1 : y0;
        if (!ballot(nx != x || ny != y)) break;
        x = nx;
        y = ny;
    }
    u32 x0 = shfl(v[0], x), x1 = shfl(v[1], x), y0 = shfl(v[0], y), y1 = shfl(v[1], y);
    if (feed.lane_id < n) store_in_order8(to, x & 32 ? x1 : x0);
    if (feed.lane_id + 32 < n) store_in_order8(to + 32, y & 32 ? y1 : y0);
}

// try_short_sequences decodes short elements from `at` on, where byte is the lane's of a peek, and
// returns how many bytes they make: 0 if the first is not short, or if there is no
// space for all; kShortBad if an offset reaches back too far. It advances `at`, not
// `out`. The caller makes sure that kShortIn bytes of input are left.
constexpr u32 kShortBad = ~0u;
template <class Format> OW_DEV u32 try_short_sequences(const Feed& feed, u32 byte, u32& at, u8* dst, u32 out, u32 room, u32 table) {
    Head element = Format::head(byte, feed.lane_id);
    u32 from = at, me = bit(feed.lane_id), bytes = element.literals + element.match, seen = element.is ? me : 0;
    // What the elements from here on make << 8, and the lane behind them; 32 and
    // more: their end.
    u32 way = element.is ? bytes << 8 | umin(feed.lane_id + element.size, 32) : 32;
    OW_UNROLL(4)
    for (u32 i = 0; i < 4; i++) {
        u32 next = shfl(way, way), more = shfl(seen, way);
        if (!(way & 32)) {
            way = (way & ~255u) + next;
            seen |= more;
        }
    }
    u32 total = shfl(way, 0) >> 8, start = total - (way >> 8), end = start + bytes;
    seen = shfl(seen, 0);
    if (total - 1 >= room) return 0;
    bool is = seen & me;
    u32 low = shfl(byte, element.back_at), back = Format::back(byte, low, shfl(byte, element.back_at + 1));
    bool match = is && element.match, needs = match && back < end, bad = match && back - 1 >= out + start + element.literals;
    u32 heads = seen;
    if (ballot(needs || bad)) {
        if (ballot(bad)) return kShortBad;
        u32 need = ballot(needs);
        u32 first = lowest_bit(need);
        heads &= (1u << first) - 1;
        u32 n = shfl(start, first);
        if (n < kShortOut) {  // too few that can be copied
            is = is && end <= kShortOut && feed.lane_id + element.size <= 32;
            heads = ballot(is);
            u32 last = highest_bit(heads);
            n = shfl(end, last);
            at += shfl(feed.lane_id + element.size, last);
            write_dependent_elements(feed, element, byte, heads, is, start, back, n, dst + out + feed.lane_id, table);
            return n;
        }
        total = n;
        at += first;
        is = heads & me;
    } else {
        at += shfl(feed.lane_id + element.size, highest_bit(seen));
    }
    u32 slot = popc(heads & (me - 1)), copies = popc(heads);
    u64 literals = (u64)(uintptr_t)feed.base + from + feed.lane_id + 1;
    u64 old = (u64)(uintptr_t)dst + (u32)(out + start + element.literals - back);
    syncwarp();  // the table's last entries were read
    if (Format::kBoth) {
        u32 two = ballot(is && element.literals);
        slot += popc(two & (me - 1));
        copies += popc(two);
        if (is && element.literals) sts128(table + 16 * slot++, {(u32)literals, (u32)(literals >> 32), element.literals, start});
        if (is) sts128(table + 16 * slot, {(u32)old, (u32)(old >> 32), element.match, start + element.literals});
    } else {
        u64 src = element.match ? old : literals;
        if (is) sts128(table + 16 * slot, {(u32)src, (u32)(src >> 32), bytes, start});
    }
    if (feed.lane_id < 3) sts64(table + 16 * (copies + feed.lane_id) + 8, {0, 0});
    syncwarp();  // and the bytes before are there
    u32 most = or_of_lanes(is ? (Format::kBoth ? element.match | element.literals : bytes) - 1 : 0);
    if (most < 16) copy_short_parts<2>(dst + out, table, copies);
    else if (most < 32) copy_short_parts<4>(dst + out, table, copies);
    else copy_short_parts<8>(dst + out, table, copies);
    return total;
}

// The shared memory of a warp of a block: rings first, each at a multiple of
// its size, then tables.
struct LzPlace { u32 ring, table; };
constexpr u32 kLzShared = OW_BATCH_WARPS * (kFeedRing + kShortTable);
OW_DEV LzPlace lz_shared_memory(u32 base, u32 warp_id) {
    return {base + warp_id * kFeedRing, base + OW_BATCH_WARPS * kFeedRing + warp_id * kShortTable};
}

// write_result writes an item's result.
OW_DEV void write_result(ow_batch_item* item, u32 status, u64 written) {
    if (lane_id() == 0) {
        item->written = status ? 0 : written;
        item->status = status;
    }
}

// decode_lz_item decodes an item of a format.
template <class Format> OW_DEV void decode_lz_item(ow_batch_item* items, u32 job, u32 base, u32 warp_id) {
    LzPlace place = lz_shared_memory(base, warp_id);
    ow_batch_item item = items[job];
    u32 status = OW_BATCH_ARG, out = 0;
    if (item.src_len >> 31 == 0 && item.dst_cap >> 31 == 0) {
        Feed feed((const u8*)(uintptr_t)item.src, (u32)item.src_len, place.ring);
        status = Format::decode_block(feed, (u8*)(uintptr_t)item.dst, (u32)item.dst_cap, keep_in_register(place.table), out);
        feed.close();
    }
    write_result(items + job, status, out);
}

}  // namespace ow
#endif
