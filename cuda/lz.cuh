// Code shared by the LZ4 and Snappy decoders: it reads the input through shared memory,
// and copies literals and matches to the output.
//
// One warp decodes one chunk. All lanes have the same positions in input and output. Each
// lane loads one of the next 32 bytes of input, so one load gets the head of an element
// and, if there are few, its literals.
#ifndef OVERWIRE_LZ_CUH
#define OVERWIRE_LZ_CUH

#include "abi_batch.h"
#include "warp.cuh"

namespace ow {

constexpr u32 kFeedBlock = 512, kFeedRing = 2 * kFeedBlock, kFeedAhead = 64;

// request_block starts to copy the block at `at` to the ring. It skips bytes outside the
// input.
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

// feed_serve waits until the input bytes [at, at + kFeedAhead) are in the ring, and
// requests the next block if there is space. It returns the new value of Feed::have.
OW_COLD u32 feed_serve(const u8* base, u32 begin, u32 end, u32 ring, u32 have, u32 at) {
    u32 issued = have & ~1u, landed = have & 1 ? issued - kFeedBlock : issued;
    if (at >= issued) {  // `at` is beyond the ring
        wait_for_copies();
        landed = issued = at & ~(kFeedBlock - 1);
    }
    syncwarp();  // all lanes have finished reading the block that is replaced
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

// A Feed reads the input through a ring of two blocks in shared memory. Offsets are
// relative to `base`, which is `src` rounded down to a multiple of 16.
struct Feed {
    const u8* base;
    u32 begin, end;  // offsets of the input
    u32 ring;        // shared address, a multiple of kFeedRing
    u32 lane_id;     // kept in a register
    u32 have;        // end of the requested blocks; bit 0: the last block is still being copied
    u32 mark;        // peek calls feed_serve from this offset on

    OW_METHOD Feed(const u8* src, u32 n, u32 to) {
        begin = (u32)((uintptr_t)src & 15);
        base = src - begin;
        end = begin + n;
        ring = keep_in_register(to);
        lane_id = keep_in_register(ow::lane_id());
        have = 0;
        mark = 0;
    }

    // peek returns each lane's byte of the next 32. Bytes after the end are undefined.
    OW_METHOD u32 peek(u32 at) {
        if (at >= mark) {
            have = feed_serve(base, begin, end, ring, have, at);
            // If a block is still being copied, the next call must come before it is read.
            // Otherwise it must come when the older block is free for the next one.
            if (have & 1) mark = have - 1 - kFeedBlock - (kFeedAhead - 1);
            else mark = have < end ? have - kFeedBlock : ~0u;
        }
        return lds8(ring | ((at + lane_id) & (kFeedRing - 1)));
    }

    // close waits for pending copies. The ring may then be reused.
    OW_METHOD void close() const {
        wait_for_copies();
        syncwarp();
    }
};

template <bool SELF> OW_DEV u32 load8(const u8* p) { return SELF ? reload8(p) : ldg8(p); }
template <bool SELF> OW_DEV u32 load32(const u8* p) { return SELF ? reload32(p) : ldg32(p); }

// copy_long copies more than 64 bytes. It stores whole words, each made of one or two
// words of the source. The remaining bytes, at most 7 at each end, are copied singly.
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

// copy_disjoint copies n bytes. Source and destination do not overlap. SELF: the source is
// output of this warp. Reads stay inside [lo, hi), which contains the source.
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

// copy_again copies a match of n > 32 bytes that begins `back` < n bytes before `to`. The
// output from there on has period `back`. Each round copies all whole periods that are
// already written, so the copied length grows with each round.
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

// copy_match copies a match of n bytes that begins `back` bytes before dst + out, where
// 0 < back <= out and out + n <= cap. If back < n, the match overlaps its own output.
OW_DEV void copy_match(u8* dst, u32 out, u32 cap, u32 back, u32 n) {
    u8* to = dst + out;
    const u8* from = to - back;
    syncwarp();  // earlier output is visible to all lanes
    if (n <= 32) {
        if (lane_id() < n) store_in_order8(to + lane_id(), reload8(from + (back < n ? lane_id() % back : lane_id())));
        return;
    }
    if (back >= n) copy_disjoint<true>(to, from, n, dst, dst + cap);
    else copy_again(to, back, n, dst, dst + cap);
}

// The short elements that begin in the next 32 bytes of input are decoded together. Each
// lane treats its byte as the head of an element. By pointer jumping, a lane finds out
// which elements follow its own, and how many bytes they produce together. The elements
// that follow from lane 0 are the real ones. The number of bytes that an element and its
// successors produce gives its position in the output.
//
// Literals, and matches in complete output, are copied four at a time, from a table in
// shared memory with one entry per copy. If a match refers to output of these same
// elements, each lane instead writes two of the next 64 bytes, and follows chains of
// matches to find them.

// A Head describes an element by its first byte: the input bytes of the element (size),
// the literals and match bytes that it produces, and the lane of its offset bytes. `is`:
// the element is short and its head is in the 32 bytes (LZ4: the whole element is).
struct Head { u32 size, literals, match, back_at; bool is; };

// kShortIn is the number of input bytes that must be left: an element may begin at the last
// of the 32 bytes and have 60 literals. kShortOut is the largest number of bytes that
// write_dependent_elements writes.
constexpr u32 kShortIn = 96, kShortOut = 64;
// Bytes of the table of copies: 24 entries, for the parts of all elements and up to three
// empty entries. Format is Lz4 or Snappy. Format::back returns an offset from a head and
// two bytes. Format::kBoth: an element may have both literals and a match.
constexpr u32 kShortTable = 24 * 16;

// copy_short_parts copies parts of at most 8 * N bytes that do not depend on each other.
// A table entry is a source address, a length and an offset from `to`. Eight lanes copy
// one part, so the warp copies four at a time. Empty entries pad the table to a multiple
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

// write_dependent_elements writes the output of elements that may depend on each other. `heads`
// has the lanes of their heads. They end within the 32 bytes of a peek and produce n <= 64
// bytes. `is`: this lane's element is one of them.
OW_DEV void write_dependent_elements(const Feed& feed, const Head& element, u32 byte, u32 heads, bool is, u32 start, u32 back, u32 n, u8* to, u32 table) {
    u32 me = bit(feed.lane_id), upto = me | (me - 1), before = 0;
    u32 starts[2] = {or_of_lanes(is ? bit(start) : 0), or_of_lanes(is ? bit(start - 32) : 0)};
    syncwarp();  // all lanes have finished reading the table
    if (is) sts64(table + 8 * popc(heads & (me - 1)), {start | element.literals << 8 | (feed.lane_id + 1) << 16, back});
    syncwarp();  // the table is written, and earlier output is visible
    u32 v[2], at[2];  // for bytes p = lane and 32 + lane: the value, and the position of the byte that it copies
    OW_UNROLL(2)
    for (u32 k = 0; k < 2; k++) {
        u32 p = feed.lane_id + 32 * k;
        u32x2 e = lds64(table + 8 * (before + popc(starts[k] & upto) - 1));
        u32 in = p - (e.x & 255);  // offset in the element's output
        v[k] = shfl(byte, (e.x >> 16) + in);
        at[k] = p;
        if (in >= (e.x >> 8 & 255) && p < n) {
            if (p < e.y) v[k] = reload8(to + ((int)(32 * k) - (int)e.y));
            else at[k] = p - e.y;
        }
        before += popc(starts[k]);
    }
    // Pointer jumping again, until all positions are those of known bytes.
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

// try_short_sequences decodes short elements from `at` on. `byte` is this lane's byte of a peek. It
// returns the number of bytes written. It returns 0 if the first element is not short or the
// output has no space, and kShortBad if an offset is before the start of the output. It
// advances `at` but not `out`. The caller has checked that kShortIn bytes of input are left.
constexpr u32 kShortBad = ~0u;
template <class Format> OW_DEV u32 try_short_sequences(const Feed& feed, u32 byte, u32& at, u8* dst, u32 out, u32 room, u32 table) {
    Head element = Format::head(byte, feed.lane_id);
    u32 from = at, me = bit(feed.lane_id), bytes = element.literals + element.match, seen = element.is ? me : 0;
    // The bytes that the elements from here on produce << 8, and the lane after them. A
    // lane of 32 or more ends the chain.
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
        if (n < kShortOut) {  // only a few bytes precede the first dependent match
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
    syncwarp();  // all lanes have finished reading the table
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
    syncwarp();  // the table is written, and earlier output is visible
    u32 most = or_of_lanes(is ? (Format::kBoth ? element.match | element.literals : bytes) - 1 : 0);
    if (most < 16) copy_short_parts<2>(dst + out, table, copies);
    else if (most < 32) copy_short_parts<4>(dst + out, table, copies);
    else copy_short_parts<8>(dst + out, table, copies);
    return total;
}

// The shared memory of a warp. The rings of all warps come first, each aligned to its
// size, then the tables of all warps.
struct LzPlace { u32 ring, table; };
constexpr u32 kLzShared = OW_BATCH_WARPS * (kFeedRing + kShortTable);
OW_DEV LzPlace lz_shared_memory(u32 base, u32 warp_id) {
    return {base + warp_id * kFeedRing, base + OW_BATCH_WARPS * kFeedRing + warp_id * kShortTable};
}

OW_DEV void write_result(ow_batch_item* item, u32 status, u64 written) {
    if (lane_id() == 0) {
        item->written = status ? 0 : written;
        item->status = status;
    }
}

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
