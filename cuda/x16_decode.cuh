// Decodes X16 on the GPU, one warp per segment (docs/format.md 3).
//
// Lane l of the warp is lane l of the codec. A warp has three parts of shared memory: a
// table of 256 slots, a ring of two blocks of words, and, after the ring, a copy of the
// ring's first 256 bytes. A tile uses at most 256 bytes of words. Within a tile the word
// address therefore increases without checks, and it wraps at most once per tile. Blocks
// are loaded by asynchronous copies, which end at the segment's end. Raw planes are
// loaded one tile ahead.
//
// For any stored bytes, the body reads only the chunk's stored bytes and writes only its
// logical bytes. Table entries are masked, words are read only from shared memory, the
// number of tiles comes from the index, and directory, planes and escapes are checked
// before they are used.
#ifndef OVERWIRE_X16_DECODE_CUH
#define OVERWIRE_X16_DECODE_CUH

#include "x16_transform.cuh"

namespace ow {

constexpr u32 kX16Table = 1024, kX16Block = 512, kX16Over = 256, kX16Header = 96;

// Bytes of shared memory per warp. The shared memory of a block is aligned to 1024. It
// has all tables, then all rings. Tables are therefore aligned to their size, so one
// bit-select computes the address of a slot, and rings are aligned to 256.
constexpr u32 kX16Ring = 2 * kX16Block + kX16Over;
constexpr u32 kX16Shared = kX16Table + kX16Ring;

struct X16Place { u32 table, ring; };  // shared addresses of one warp

OW_DEV X16Place x16_shared_memory(u32 base, u32 warp_id, u32 warps) {
    return {base + warp_id * kX16Table, base + warps * kX16Table + warp_id * kX16Ring};
}

// A segment, as read from the chunk's header and directory after their checks.
struct X16Segment {
    const u8* src;
    u8* dst;
    u32 stored, logical;
    u32 first, tiles;      // the segment's first tile in the chunk, and its number of tiles
    u32 words, end;        // offsets in the chunk: first word, end of the segment
    u32 escapes;
    u32 planes;            // offset of the first stored plane
    u32 header;            // this lane's word of the header, in lanes 0..23
    bool coded;            // false: the chunk has one symbol only (mode 1)
};

OW_DEV u32 header_byte(const X16Segment& s, u32 at) { return shfl(s.header, at >> 2) >> (8 * (at & 3)) & 255; }

// x16_open_segment reads and checks everything except the coded bytes. It returns 0 or
// status bits, the same in all lanes.
template <int TR> OW_DEV u32 x16_open_segment(X16Segment& s, const ow_x16_chunk& c, u32 seg) {
    typedef Transform<TR> X;
    s.src = (const u8*)(uintptr_t)c.src;
    s.dst = (u8*)(uintptr_t)c.dst;
    s.stored = c.stored;
    s.logical = c.logical;
    if (c.stored < kX16Header || c.tiles == 0 || c.tiles > 256) return OW_X16_LAYOUT;
    u32 total = c.logical / (32 * X::kOut);
    u32 segs = (total + c.tiles - 1) / c.tiles;
    if (seg >= (segs ? segs : 1)) return OW_X16_LAYOUT;
    s.first = seg * c.tiles;
    s.tiles = umin(c.tiles, total - s.first);
    s.header = ldg32(s.src + 4 * umin(lane_id(), kX16Header / 4 - 1));
    u32 mode = shfl(s.header, 0);
    s.coded = (mode & 255) == 0;
    // Only coded chunks can have an escape symbol, and only if the transform has escapes.
    u32 escape = mode >> 24, most = X::kEscapes && s.coded ? 16 : 0;
    if ((mode & 255) > 1 || escape > most || shfl(s.header, 1) != total) return OW_X16_LAYOUT;
    s.planes = kX16Header;
    if (s.coded && segs) {
        u32 dir_end = kX16Header + 8 * (segs + 1);
        if (dir_end > c.stored) return OW_X16_LAYOUT;
        const u8* dir = s.src + kX16Header;
        u32x2 here = ldg64(dir + 8 * seg), next = ldg64(dir + 8 * seg + 8), last = ldg64(dir + 8 * segs);
        s.end = next.x;
        s.escapes = here.y;
        s.planes = last.x;
        bool good = here.x >= dir_end && (here.x | next.x | last.x) % 16 == 0 && next.x <= last.x &&
                    last.x <= c.stored && here.x <= next.x && next.x - here.x >= 128;
        if (!good || (s.escapes && !escape)) return OW_X16_LAYOUT;
        s.words = here.x + 128;
    } else if (s.coded) {
        // No tiles: the directory has one entry, and only the tail follows.
        s.planes = kX16Header + 16;
    }
    u32 stored_planes = 0;
    for (int i = 0; i < X::kPlanes; i++) stored_planes += mode >> (16 + i) & 1 ? 0 : 32 * X::plane_bits(i) * total;
    u32 tail = c.logical - total * 32 * X::kOut;
    if ((mode >> 16 & 255) >> X::kPlanes) return OW_X16_LAYOUT;
    bool fits = s.planes <= c.stored && c.stored - s.planes == stored_planes + tail;
    return fits ? 0 : OW_X16_LAYOUT;
}

// x16_expand_table expands the 16 alias buckets to 256 slots: freq << 24 | rank << 16 |
// value. The value is shifted to its position in the element.
template <int TR> OW_DEV void x16_expand_table(const X16Segment& s, u32 table) {
    u32 b = lane_id() & 15;
    u32 value = header_byte(s, 16 + b), freq = header_byte(s, 32 + b);
    u32 div = header_byte(s, 48 + b), other = header_byte(s, 64 + b) & 15;
    // The number of ranks of `other` that are used before bucket b, minus b's divider.
    u32 bias = shfl(div, other) - div;
    for (u32 i = 0; i < 15; i++) {
        u32 d = shfl(div, i), a = shfl(other, i);
        if (i < b && a == other && d < 16) bias += 16 - d;
    }
    u32 field = freq << 24 | (Transform<TR>::place_symbol(value) & 0xffff);
    // Two lanes per bucket, eight slots per lane.
    u32 mine = lane_id() >> 1, r = 8 * (lane_id() & 1);
    u32 own = shfl(field, mine), alias = shfl(field, shfl(other, mine));
    u32 d = shfl(div, mine), up = shfl(bias, mine);
    u32 e[8];
    for (u32 i = 0; i < 8; i++, r++) e[i] = r < d ? own | r << 16 : alias | ((r + up) & 255) << 16;
    syncwarp();  // all lanes have finished reading the previous table
    sts128(table + 32 * lane_id(), {e[0], e[1], e[2], e[3]});
    sts128(table + 32 * lane_id() + 16, {e[4], e[5], e[6], e[7]});
}

// X16Words reads the words of one segment through the ring.
struct X16Words {
    static constexpr u32 kRing = 2 * kX16Block;
    const u8* src;   // the chunk
    u32 first, end;  // offsets in the chunk: first word, end of the segment
    u32 ring;        // shared address
    u32 block;       // number of the block at the cursor

    // request_block starts to copy block k. It does not copy bytes after the segment's end.
    // The check of the cursor at the end finds out whether the decoder used any.
    OW_METHOD void request_block(u32 k) const {
        u32 at = first + k * kX16Block, to = ring + (k & 1) * kX16Block, o = 16 * lane_id();
        if (at + o < end) {
            copy_async16(to + o, src + at + o);
            if (o < kX16Over && !(k & 1)) copy_async16(ring + kRing + o, src + at + o);
        }
    }
    OW_METHOD void wait_for_blocks() const {
        wait_for_copies();
        syncwarp();
    }
    OW_METHOD void start() {
        block = 0;
        request_block(0);
        wait_for_blocks();
        request_block(1);
    }
    // advance is called when the cursor has entered the next 256 bytes of the ring. It
    // requests a block when its slot becomes free, and waits for a block when the next
    // tile may need it. It returns the wrapped cursor.
    OW_METHOD u32 advance(u32 at) {
        u32 in = (at - ring) % kX16Block;
        if (in >= kX16Block - 256) {
            wait_for_blocks();
        } else if (in < 256) {
            syncwarp();
            request_block(++block + 1);
        }
        return at - ring < kRing ? at : at - kRing;
    }
    // finish waits for pending copies and returns the number of bytes of words that were
    // used.
    OW_METHOD u32 finish(u32 at) const {
        u32 in = (at - ring) % kX16Block;
        if (in < kX16Block - 256) wait_for_blocks();
        return block * kX16Block + in;
    }
};

// x16_next_entry returns the next symbol's table entry and updates the state x.
OW_DEV u32 x16_next_entry(u32& x, u32 table) {
    u32 e = lds32(table | (x << 2 & 0x3fc));
    u32 high = x >> 8;
    x = (e >> 24) * high + prmt(e, 0, 0x4442);
    return e;
}

// x16_refill renormalises the states: lanes with x < 2^16 take the next words, in lane
// order. `at` is the shared address of the next word.
OW_DEV void x16_refill(u32& x, u32& at, u32 below) {
    u32 need = ballot(x < 0x10000);
    u32 w = lds16(at + 2 * popc(need & below));
    refill_16_bits(x, w);
    at += 2 * popc(need);
}

// X16Planes loads a lane's bytes of the raw planes.
template <int TR> struct X16Planes {
    static constexpr int N = Transform<TR>::kPlanes;
    u32 at[N ? N : 1];  // offset in the chunk of the lane's bytes in tile 0 of the segment
    u32 constant;       // bit i: plane i is constant
    Raw<N> next;

    OW_METHOD void open_planes(const X16Segment& s, u32 total) {
        u32 off = s.planes;
        constant = header_byte(s, 2);
        for (int i = 0; i < N; i++) {
            u32 w = Transform<TR>::plane_bits(i), v = header_byte(s, 8 + i);
            // For a constant plane, fill the lane's bytes with the constant now.
            v = w == 8 ? v * 0x01010101 : w == 4 ? (v & 15) * 0x11111111 : v & 1 ? 255 : 0;
            next.p[i] = {v, v};
            at[i] = off + (s.first * 32 + lane_unit()) * w;
            off += constant >> i & 1 ? 0 : 32 * w * total;
        }
    }
    // load_tile fills `next` with the planes of tile t.
    OW_METHOD void load_tile(const u8* src, u32 t) {
        for (int i = 0; i < N; i++) {
            if (constant >> i & 1) continue;
            u32 w = Transform<TR>::plane_bits(i);
            const u8* a = src + (at[i] + t * 32 * w);
            if (w == 8) next.p[i] = ldg64(a);
            if (w == 4) next.p[i].x = ldg32(a);
            if (w == 1) next.p[i].x = ldg8(a);
        }
    }
};

// x16_apply_lane_escapes writes the elements that are coded as escapes. `at` is the offset of
// the escape list in the chunk. Returns status bits of this lane only.
template <int TR> OW_DEV u32 x16_apply_lane_escapes(const X16Segment& s, u32 at) {
    typedef Transform<TR> X;
    u32 bad = 0, total = s.logical / (32 * X::kOut), off = s.planes, konst = header_byte(s, 2);
    const u8* plane[X::kPlanes + 1];
    u32 k[X::kPlanes + 1];
    for (int i = 0; i < X::kPlanes; i++) {
        k[i] = header_byte(s, 8 + i);
        plane[i] = konst >> i & 1 ? nullptr : s.src + off;
        off += konst >> i & 1 ? 0 : 32 * X::plane_bits(i) * total;
    }
    syncwarp();  // orders the escapes after the tile stores of other lanes
    for (u32 i = lane_id(); i < s.escapes; i += 32) {
        u32 n = ldg16(s.src + at + 2 * i);
        bool rising = i == 0 || ldg16(s.src + at + 2 * i - 2) < n;
        if (n >= s.tiles * 256 || !rising) {
            bad = OW_X16_ESCAPE;
            continue;
        }
        X::write_element(s.dst, s.first * 256 + n, ldg8(s.src + at + 2 * s.escapes + i), plane, k);
    }
    return bad;
}

// x16_decode_tiles decodes the segment's tiles. Returns the number of bytes of words that
// were used. Adds status bits of this lane only to `bad`.
template <int TR> OW_DEV u32 x16_decode_tiles(const X16Segment& s, X16Place place, u32& bad) {
    typedef Transform<TR> X;
    X16Words w;
    w.src = s.src;
    w.first = s.words;
    w.end = s.end;
    w.ring = place.ring;
    syncwarp();
    w.start();

    X16Planes<TR> p;
    p.open_planes(s, s.logical / (32 * X::kOut));
    p.load_tile(s.src, 0);
    u32 x = ldg32(s.src + s.words - 128 + 4 * lane_id());
    if (x < 0x10000) bad |= OW_X16_STATE;
    u8* out = s.dst + (u64)s.first * (32 * X::kOut) + lane_unit() * X::kOut;
    u32 at = place.ring, below = lanes_below();
    OW_UNROLL(1)
    for (u32 t = 0;;) {
        Raw<X::kPlanes> raw = p.next;
        bool more = ++t < s.tiles;
        if (more) p.load_tile(s.src, t);
        u32 was = at, e[8];
        for (int i = 0; i < 8; i += 2) {
            e[i] = x16_next_entry(x, place.table);
            e[i + 1] = x16_next_entry(x, place.table);
            x16_refill(x, at, below);
        }
        X::store_unit(out, e, raw);
        out += 32 * X::kOut;
        if ((was ^ at) & ~255u) at = w.advance(at);
        if (!more) break;
    }
    if (x != 0x10000) bad |= OW_X16_STATE;
    return w.finish(at);
}

// x16_write_one_symbol writes the segment's tiles if the chunk has only one symbol.
template <int TR> OW_DEV void x16_write_one_symbol(const X16Segment& s) {
    typedef Transform<TR> X;
    u32 symbol = header_byte(s, 1) & 15, v = X::place_symbol(header_byte(s, 16 + symbol)) & 0xffff;
    u32 e[8] = {v, v, v, v, v, v, v, v};
    X16Planes<TR> p;
    p.open_planes(s, s.logical / (32 * X::kOut));
    u8* out = s.dst + (u64)s.first * (32 * X::kOut) + lane_unit() * X::kOut;
    for (u32 t = 0; t < s.tiles; t++) {
        p.load_tile(s.src, t);
        X::store_unit(out, e, p.next);
        out += 32 * X::kOut;
    }
}

// An X16Listed is a segment job from an array of ow_x16_seg.
struct X16Listed {
    const ow_x16_chunk* chunks;
    const ow_x16_seg* segs;
    u32 job;
    OW_METHOD ow_x16_chunk chunk() const { return chunks[segs[job].chunk]; }
    OW_METHOD u32 seg() const { return segs[job].seg; }
};

// x16_decode_segment decodes one segment. If it is the chunk's last, it also copies the tail.
// `table` tells whether the chunk's table is in shared memory already.
template <int TR, class Job> OW_DEV void x16_decode_segment(const Job& job, u32* status, X16Place place, bool& table) {
    typedef Transform<TR> X;
    u32 bad = 0, used = 0;
    {
        ow_x16_chunk c = job.chunk();
        X16Segment s;
        bad = x16_open_segment<TR>(s, c, job.seg());
        if (bad) {
            if (lane_id() == 0) atomic_or(status + c.status, bad);
            return;
        }
        if (!s.coded) {
            x16_write_one_symbol<TR>(s);
        } else if (s.tiles) {
            if (!table) x16_expand_table<TR>(s, place.table);
            table = true;
            used = x16_decode_tiles<TR>(s, place, bad);
        }
    }
    // Load the chunk and segment again. Keeping them would cost the tile loop ten
    // registers.
    ow_x16_chunk c = job.chunk();
    X16Segment s;
    x16_open_segment<TR>(s, c, job.seg());
    if (s.coded && s.tiles) {
        u32 list = s.words + used;
        bool fits = s.escapes <= s.tiles * 256 && (list + 3 * s.escapes + 15) / 16 * 16 == s.end;
        if (!fits) bad |= OW_X16_WORDS;
        if (fits && s.escapes) bad |= x16_apply_lane_escapes<TR>(s, list);
        if (bad) atomic_or(status + c.status, bad);
    }
    u32 full = (s.first + s.tiles) * 32 * X::kOut, tail = c.logical - full;
    if (tail < 32 * X::kOut) {
        const u8* from = s.src + c.stored - tail;
        for (u32 i = lane_id(); i < tail; i += 32) stg8(s.dst + full + i, ldg8(from + i));
    }
}

template <int TR> OW_DEV void x16_decode_listed(const ow_x16_chunk* chunks, const ow_x16_seg* segs, u32 job, u32* status, X16Place place) {
    bool table = false;
    x16_decode_segment<TR>(X16Listed{chunks, segs, job}, status, place, table);
}

}  // namespace ow
#endif
