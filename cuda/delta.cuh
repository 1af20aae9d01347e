// Encodes and decodes XOR deltas on the device. The package comment of gosrc/codec/delta
// describes the layout. The encoder's output equals the Go encoder's byte for byte.
//
// One warp handles one chunk. In delta_apply each lane decodes one run at a time. It XORs the
// changed elements into memory with atomic operations, because two elements may share a
// word. The host has checked the chunk (delta.Check). Even for a corrupt chunk,
// delta_apply reads only the stored chunk and changes only the chunk's elements.
//
// The encoder reads the new and the old bytes three times, 16 bytes per lane: to count
// classes, to measure each run, and to write the bits. Few lanes find a change in the same
// step. Changes are therefore collected in a queue in shared memory, and each lane then
// takes one change from the queue.
#ifndef OVERWIRE_DELTA_CUH
#define OVERWIRE_DELTA_CUH

#include "abi_delta.h"
#include "warp.cuh"

namespace ow {

constexpr u32 kDeltaClasses = 24, kDeltaOnes = 8, kDeltaRun = 512, kDeltaMaxS = 9, kDeltaHead = 16;
// Offsets in a warp's shared memory when encoding: counts per class, the code table, and the
// queue. A queue entry is an element's index and the low 32 bits of its XOR. For elements of 8
// bytes, the high 32 bits are at kDeltaHigh.
constexpr u32 kDeltaCounts = 0, kDeltaCodes = 128, kDeltaQueue = 256, kDeltaHigh = kDeltaQueue + 8 * 128;
constexpr u32 kDeltaMany = 64;  // number of queued changes at which the queue is processed
static_assert(kDeltaQueue + 8 * (kDeltaMany - 1 + 512) <= OW_DELTA_SHARED && kDeltaMany - 1 + 64 <= 128, "the queue has a tile's changes");

OW_DEV u32 bit_length(u64 x) {
    u32 hi = (u32)(x >> 32);
    return hi ? 33 + highest_bit(hi) : 1 + highest_bit((u32)x);
}

OW_DEV u32 class_of_change(u64 x, u32 lg) {
    u32 n = bit_length(x);
    if ((x & (x + 1)) == 0 && n <= kDeltaOnes) return n - 1;
    return kDeltaOnes + ((n - 1) >> (lg ? lg - 1 : 0));
}

// bits_after_class returns the number of low bits of the XOR that follow the class's code.
OW_DEV u32 bits_after_class(u32 cls, u32 lg) {
    if (cls < kDeltaOnes) return 0;
    return lg < 2 ? cls - kDeltaOnes : (cls - kDeltaOnes + 1) << (lg - 1);
}

OW_DEV u32 reverse_byte(u32 b) {
    u32 r = 0;
    for (u32 i = 0; i < 8; i++) r |= (b >> i & 1) << (7 - i);
    return r;
}

// first_slot_of_class returns the lowest byte value that begins with the code of a class, highest
// bit first. length(i) is the code length of class i.
template <class F> OW_DEV u32 first_slot_of_class(u32 cls, F length) {
    u32 mine = length(cls), at = 0;
    for (u32 i = 0; i < kDeltaClasses; i++) {
        u32 n = length(i);
        if (n && (n < mine || (n == mine && i < cls))) at += 256 >> n;
    }
    return at;
}

OW_DEV u32 code_length_of_class(const u32* head, u32 cls) { return (cls < 8 ? head[1] : cls < 16 ? head[2] : head[3]) >> (4 * (cls & 7)) & 15; }

// A DeltaReader reads the bits of a chunk. After the last bit it reads zeros.
struct DeltaReader {
    const u8* p;
    u32 words, at, pos;  // at: index of the word in lo
    u32 lo, hi;

    OW_METHOD u32 word(u32 i) const { return i < words ? ldg32(p + 4 * i) : 0; }

    // peek returns the next 32 bits.
    OW_METHOD u32 peek() {
        u32 i = pos >> 5;
        if (i != at) {
            lo = i == at + 1 ? hi : word(i);
            hi = word(i + 1);
            at = i;
        }
        return (u32)(((u64)hi << 32 | lo) >> (pos & 31));
    }
};

OW_DEV void xor_element(u8* dst, u32 i, u64 x, u32 lg) {
    uintptr_t at = (uintptr_t)dst + ((uintptr_t)i << lg);
    u32* word = (u32*)(at & ~(uintptr_t)3);
    atomic_xor(word, (u32)x << (8 * (at & 3)));
    if (lg == 3) atomic_xor(word + 1, (u32)(x >> 32));
}

// apply_run applies one run: the elements [first, last). The bits of the run end at `end`.
OW_DEV void apply_run(DeltaReader& r, u8* dst, u32 first, u32 last, u32 end, u32 k, u32 table, u32 lg) {
    u32 at = first;
    while (r.pos < end) {
        u32 v = r.peek(), gap = 0;
        while (v == 0 && r.pos < end) {
            gap += 32;
            r.pos += 32;
            v = r.peek();
        }
        if (v == 0) return;
        u32 z = lowest_bit(v);
        r.pos += z + 1;
        v = r.peek();
        u64 to = at + ((u64)(gap + z) << k) + (v & ((1u << k) - 1));
        u32 e = lds16(table + 2 * (v >> k & 255)), cls = e >> 8, n = bits_after_class(cls, lg);
        r.pos += k + (e & 255);
        u64 x = cls < kDeltaOnes ? (2ull << cls) - 1 : 0;
        if (n) {
            u64 low = r.peek();
            if (n > 32) {
                r.pos += 32;
                n -= 32;
                low |= (u64)r.peek() << 32;
                x = low & ~0ull >> (32 - n);
            } else {
                x = low & ~0u >> (32 - n);
            }
            r.pos += n;
        }
        if (cls >= kDeltaOnes && lg < 2) x |= 1u << (cls - kDeltaOnes);
        if (e == 0 || to >= last || r.pos > end) return;
        xor_element(dst, (u32)to, x, lg);
        at = (u32)to + 1;
    }
}

OW_DEV void delta_apply(const ow_delta_row* rows, u32 job, u32 shared) {
    ow_delta_row row = rows[job];
    u8* dst = (u8*)(uintptr_t)row.now;
    const u8* src = (const u8*)(uintptr_t)row.at;
    u32 head[4];
    if (row.stored < kDeltaHead) return;  // nothing changed
    for (u32 i = 0; i < 4; i++) head[i] = ldg32(src + 4 * i);
    if ((head[0] & 255) == 1) {
        if (row.stored < kDeltaHead + row.bytes) return;
        for (u32 i = lane_id(); i < row.bytes >> row.lg; i += 32) {
            u64 x = 0;
            for (u32 b = 0; b < 1u << row.lg; b++) x |= (u64)ldg8(src + kDeltaHead + (i << row.lg) + b) << (8 * b);
            xor_element(dst, i, x, row.lg);
        }
        return;
    }
    u32 k = head[0] >> 8 & 31, run = kDeltaRun << (head[0] >> 16 & 15) >> row.lg;
    for (u32 i = lane_id(); i < 128; i += 32) sts32(shared + 4 * i, 0);
    syncwarp();
    u32 cls = lane_id();
    if (cls < kDeltaClasses && code_length_of_class(head, cls)) {
        u32 n = code_length_of_class(head, cls), at = first_slot_of_class(cls, [&](u32 i) { return code_length_of_class(head, i); });
        for (u32 j = 0; j < 256u >> n; j++) sts16(shared + 2 * (reverse_byte(at + j) & 255), cls << 8 | n);
    }
    syncwarp();
    u32 elements = row.bytes >> row.lg, runs = (elements + run - 1) / run, body = kDeltaHead + ((2 * runs + 3) & ~3u);
    if (body > row.stored) return;
    u32 off = 0;
    for (u32 first = 0; first < runs; first += 32) {
        u32 i = first + lane_id(), bits = i < runs ? ldg16(src + kDeltaHead + 2 * i) : 0, upto = sum_of_lanes_to(bits);
        DeltaReader r = {src + body, (row.stored - body) / 4, ~1u, off + upto - bits, 0, 0};
        if (bits) apply_run(r, dst, i * run, umin(elements, (i + 1) * run), off + upto, k, shared, row.lg);
        off += shfl(upto, 31);
    }
}

// load_xor16 returns the XOR of the 16 new and old bytes at `at`. Bytes at row.bytes and above are 0.
OW_DEV u32x4 load_xor16(const ow_delta_row& row, u32 at) {
    const u8 *a = (const u8*)(uintptr_t)row.now + at, *b = (const u8*)(uintptr_t)row.base + at;
    if (at + 16 <= row.bytes && (((uintptr_t)a | (uintptr_t)b) & 15) == 0) {
        u32x4 x = ldg128(a), y = ldg128(b);
        return {x.x ^ y.x, x.y ^ y.y, x.z ^ y.z, x.w ^ y.w};
    }
    u32 v[4] = {0, 0, 0, 0};
    for (u32 i = 0; i < 16 && at + i < row.bytes; i++) v[i / 4] |= (ldg8(a + i) ^ ldg8(b + i)) << (8 * (i & 3));
    return {v[0], v[1], v[2], v[3]};
}

// bits_of_changed_bytes returns a mask of the nonzero bytes of x, one bit per byte.
OW_DEV u32 bits_of_changed_bytes(u32 x) {
    u32 top = (x | ((x & 0x7f7f7f7f) + 0x7f7f7f7f)) & 0x80808080;
    return ((top >> 7) * 0x10204080) >> 28;
}

// queue_changes appends the changed elements of a tile to the queue, in order, and returns the
// new number of changes in the queue. `have` is the old number. A tile has 512 bytes, and v is
// the XOR of this lane's 16 bytes.
OW_DEV u32 queue_changes(u32x4 v, u32 tile, u32 lg, u32 queue, u32 high, u32 have) {
    u32 m = bits_of_changed_bytes(v.x) | bits_of_changed_bytes(v.y) << 4 | bits_of_changed_bytes(v.z) << 8 | bits_of_changed_bytes(v.w) << 12;
    if (lg >= 1) m = (m | m >> 1) & 0x5555;
    if (lg >= 2) m = (m | m >> 2) & 0x1111;
    if (lg == 3) m = (m | m >> 4) & 0x0101;
    if (!ballot(m != 0)) return have;
    u32 n = popc(m), upto = sum_of_lanes_to(n), at = have + upto - n, first = (512 * tile + 16 * lane_id()) >> lg;
    for (; m; m &= m - 1, at++) {
        u32 i = lowest_bit(m), half = i & 4;
        u32 x = (i & 8 ? (half ? v.w : v.z) : (half ? v.y : v.x)) >> (8 * (i & 3));
        if (lg < 2) x &= (1u << (8 << lg)) - 1;
        sts64(queue + 8 * at, {first + (i >> lg), x});
        if (lg == 3) sts32(high + 4 * at, i & 8 ? v.w : v.y);
    }
    return have + shfl(upto, 31);
}

// take_changes calls f(gap, x) for each of the n changes in the queue, one per lane. Lanes
// without a change call f with x = 0. `next` is the index of the element after the last change.
template <class F> OW_DEV void take_changes(u32 queue, u32 high, u32 n, u32 lg, u32& next, F f) {
    syncwarp();
    for (u32 i = lane_id(); i < ((n + 31) & ~31u); i += 32) {
        u32x2 e = {0, 0};
        u32 hi = 0, prev = next;
        if (i < n) {
            e = lds64(queue + 8 * i);
            if (lg == 3) hi = lds32(high + 4 * i);
            if (i > 0) prev = lds32(queue + 8 * (i - 1)) + 1;
        }
        f(e.x - prev, (u64)hi << 32 | e.y);
    }
    if (n) next = lds32(queue + 8 * (n - 1)) + 1;
    syncwarp();
}

// for_each_change calls f(gap, x) for the changes of a chunk, as take_changes does. After each run
// of 512 << run_log bytes it calls done(run). The first gap of a run counts from the run's start.
template <class F, class G> OW_DEV void for_each_change(const ow_delta_row& row, u32 run_log, u32 shared, F f, G done) {
    u32 queue = shared + kDeltaQueue, high = shared + kDeltaHigh, lg = row.lg, last = (1u << run_log) - 1, tiles = (row.bytes + 511) / 512;
    u32 n = 0, next = 0;
    OW_UNROLL(1)
    for (u32 tile = 0; tile < tiles; tile++) {
        u32 at = 512 * tile + 16 * lane_id();
        n = queue_changes(at < row.bytes ? load_xor16(row, at) : u32x4{0, 0, 0, 0}, tile, lg, queue, high, n);
        bool ends = (tile & last) == last || tile + 1 == tiles;
        if (n >= kDeltaMany || (n && ends)) {
            take_changes(queue, high, n, lg, next, f);
            n = 0;
        }
        if (ends) {
            done(tile >> run_log);
            next = 512 * (tile + 1) >> lg;
        }
    }
}

// delta_lengths replaces the counts of the classes with code lengths, as codeLengths of the Go
// encoder does. Only one lane calls it.
OW_COLD void delta_lengths(u32 counts) {
    u32 total = 0, kinds = 0, sum = 0;
    u8 length[kDeltaClasses];
    for (u32 i = 0; i < kDeltaClasses; i++) total += lds32(counts + 4 * i);
    for (u32 i = 0; i < kDeltaClasses; i++) {
        u32 c = lds32(counts + 4 * i), n = 1;
        length[i] = 0;
        if (c == 0) continue;
        while (n < 8 && (u64)c << n < total) n++;
        length[i] = (u8)n;
        kinds++;
        sum += 256 >> n;
    }
    while (kinds > 1 && sum > 256) {
        u32 at = kDeltaClasses, least = ~0u;
        for (u32 i = 0; i < kDeltaClasses; i++) {
            u32 c = lds32(counts + 4 * i);
            if (c && length[i] < 8 && c < least) at = i, least = c;
        }
        length[at]++;
        sum -= 256 >> length[at];
    }
    while (kinds > 1 && sum < 256) {
        u32 at = kDeltaClasses, most = 0;
        for (u32 i = 0; i < kDeltaClasses; i++) {
            u32 c = lds32(counts + 4 * i);
            if (c && length[i] > 1 && (256u >> length[i]) <= 256 - sum && c > most) at = i, most = c;
        }
        sum += 256 >> length[at];
        length[at]--;
    }
    for (u32 i = 0; i < kDeltaClasses; i++) sts32(counts + 4 * i, length[i]);
}

// make_code_table makes the code table of a head. The entry of a class is its code, the code's
// length << 8 and the number of bits after the code << 16.
OW_DEV void make_code_table(const u32* head, u32 lg, u32 codes) {
    u32 cls = lane_id();
    if (cls < kDeltaClasses) {
        u32 n = code_length_of_class(head, cls), at = first_slot_of_class(cls, [&](u32 i) { return code_length_of_class(head, i); });
        sts32(codes + 4 * cls, n ? (reverse_byte(at) & 255) | n << 8 | bits_after_class(cls, lg) << 16 : 0);
    }
    syncwarp();
}

// bits_of_change returns the number of bits of a change. `code` is its entry in the code table.
OW_DEV u32 bits_of_change(u32 gap, u32 k, u32 code) { return (gap >> k) + 1 + k + (code >> 8 & 255) + (code >> 16); }

OW_DEV void delta_measure(ow_delta_row* rows, u32 job, u32 shared) {
    ow_delta_row row = rows[job];
    u32 counts = shared + kDeltaCounts, codes = shared + kDeltaCodes, lg = row.lg;
    sts32(counts + 4 * lane_id(), 0);
    syncwarp();
    // Counting does not use gaps, so the chunk is treated as one run.
    for_each_change(row, 31, shared, [&](u32, u64 x) { if (x) increment32(counts + 4 * class_of_change(x, lg)); }, [](u32) {});
    syncwarp();
    u32 changed = 0;
    for (u32 i = 0; i < kDeltaClasses; i++) changed += lds32(counts + 4 * i);
    syncwarp();
    ow_delta_row* out = rows + job;
    if (changed == 0) {
        if (lane_id() == 0) out->stored = 0;
        return;
    }
    if (lane_id() == 0) delta_lengths(counts);
    syncwarp();
    u32 elements = row.bytes >> lg, s = 0;
    u64 mean = 63 * (u64)(2 * elements - changed) / (262 * (u64)changed);
    u32 k = mean ? bit_length(mean) : 0;
    while (s < kDeltaMaxS && (u64)changed * (kDeltaRun << s) < 24 * (u64)row.bytes) s++;
    u32 head[4] = {k << 8 | s << 16, 0, 0, 0};
    for (u32 i = 0; i < kDeltaClasses; i++) head[1 + i / 8] |= lds32(counts + 4 * i) << (4 * (i & 7));
    make_code_table(head, lg, codes);
    u32 run = kDeltaRun << s, runs = (row.bytes + run - 1) / run;  // run is in bytes
    u64 total = 0;
    u32 mine = 0;
    bool raw = false;
    for_each_change(row, s, shared, [&](u32 gap, u64 x) { if (x) mine += bits_of_change(gap, k, lds32(codes + 4 * class_of_change(x, lg))); }, [&](u32) {
        u32 bits = shfl(sum_of_lanes_to(mine), 31);
        total += bits;
        raw = raw || bits > 0xffff;
        mine = 0;
    });
    u32 most = kDeltaHead + ((row.bytes + 3) & ~3u);
    u64 stored = kDeltaHead + ((2 * runs + 3) & ~3u) + (total + 31) / 32 * 4;
    if (raw || stored >= most) {
        stored = most;
        head[0] = 1;
        head[1] = head[2] = head[3] = 0;
    }
    if (lane_id() == 0) {
        out->stored = (u32)stored;
        for (u32 i = 0; i < 4; i++) out->head[i] = head[i];
    }
}

// put_bits writes n bits, at most 64, at bit `pos`. The bits there must be 0, because it ORs.
OW_DEV void put_bits(u32* words, u32 pos, u64 v, u32 n) {
    u32 s = pos & 31, over = n + s;
    words += pos >> 5;
    atomic_or(words, (u32)v << s);
    if (over > 32) atomic_or(words + 1, (u32)(v >> (32 - s)));
    if (over > 64) atomic_or(words + 2, (u32)(v >> 32) >> (32 - s));
}

OW_DEV void delta_write(const ow_delta_row* rows, u32 job, u32 shared) {
    ow_delta_row row = rows[job];
    if (row.stored == 0) return;
    u8* to = (u8*)(uintptr_t)row.at;
    for (u32 i = 4 * lane_id(); i < row.stored; i += 128) store_in_order32(to + i, 0);
    syncwarp();
    if (lane_id() == 0) {
        for (u32 i = 0; i < 4; i++) store_in_order32(to + 4 * i, row.head[i]);
    }
    u32 lg = row.lg, codes = shared + kDeltaCodes;
    if ((row.head[0] & 255) == 1) {
        const u8 *a = (const u8*)(uintptr_t)row.now, *b = (const u8*)(uintptr_t)row.base;
        for (u32 i = lane_id(); i < row.bytes; i += 32) stg8(to + kDeltaHead + i, ldg8(a + i) ^ ldg8(b + i));
        return;
    }
    u32 head[4] = {row.head[0], row.head[1], row.head[2], row.head[3]};
    make_code_table(head, lg, codes);
    u32 k = head[0] >> 8 & 255, s = head[0] >> 16, run = kDeltaRun << s, runs = (row.bytes + run - 1) / run;
    u32* words = (u32*)(to + kDeltaHead + ((2 * runs + 3) & ~3u));
    u32 off = 0, begin = 0;
    auto put = [&](u32 gap, u64 x) {
        u32 c = x ? lds32(codes + 4 * class_of_change(x, lg)) : 0, bits = x ? bits_of_change(gap, k, c) : 0, upto = sum_of_lanes_to(bits), rest = c >> 16;
        u32 pos = off + upto - bits + (gap >> k), fixed = 1 + k + (c >> 8 & 255);
        off += shfl(upto, 31);
        if (!x) return;
        u64 low = 1 | (u64)(gap & ((1u << k) - 1)) << 1 | (u64)(c & 255) << (1 + k);
        x &= rest < 64 ? (1ull << rest) - 1 : ~0ull;
        if (fixed + rest <= 64) {
            put_bits(words, pos, low | x << fixed, fixed + rest);
        } else {
            put_bits(words, pos, low, fixed);
            put_bits(words, pos + fixed, x, rest);
        }
    };
    for_each_change(row, s, shared, put, [&](u32 r) {
        if (lane_id() == 0) stg16(to + kDeltaHead + 2 * r, off - begin);
        begin = off;
    });
}

}  // namespace ow
#endif
