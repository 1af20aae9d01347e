// Encodes X16: one block of 4 to 16 warps encodes one chunk (docs/format.md 3). The
// output equals the Go encoder's byte for byte.
//
// The warps of a block process the chunk in phases, with a barrier after each:
//
//   0  clear the counts   1  count values   2  sum the counts
//   3  one warp fits the model and makes the tables
//   4  each warp codes its segments to measure them, without writing
//   5  one warp computes the layout and writes header, directory and tail
//   6  each warp codes its segments again and writes them and the planes
//
// Coding twice is faster than writing words to temporary offsets and moving them.
// Source and destination are aligned to 16. Phase 5 compares the size with dst_cap
// before anything is written.
#ifndef OVERWIRE_X16_ENCODE_CUH
#define OVERWIRE_X16_ENCODE_CUH

#include "abi_batch.h"
#include "x16_fit.cuh"
#include "x16_split.cuh"

namespace ow {

// Offsets in shared memory. kCounts: counts of values, in eight copies to reduce conflicts
// between lanes; from phase 4 on, the words and escapes of each segment. kEntries: for each
// value, frequency | escape << 8 | address of its first slot << 16, and the inverse of the
// frequency.
constexpr u32 kCounts = 0, kEntries = 8192, kBins = 10240, kSlots = 11264, kHead = 11520, kFacts = kHead + 96;
constexpr u32 kEncodeShared = kFacts + 144, kEncodePhases = 7;
// Facts about the chunk: its state (the enum below), the offset of its planes, whether it has
// escapes, and each warp's AND and OR of all elements.
constexpr u32 kState = kFacts, kPlanes = kFacts + 4, kEscapes = kFacts + 8, kAll = kFacts + 16, kAny = kFacts + 80;
enum : u32 { kCoded = 0, kOneSymbol = 1, kRefused = 2 };
constexpr u32 kMostChunk = 16 << 20;

// The division of a chunk into segments, as in segmentGrid of gosrc/codec/x16.
struct X16Grid { u32 tiles, seg, segs; };

template <int TR> OW_DEV X16Grid x16_grid(u32 bytes) {
    X16Grid g;
    g.tiles = bytes / (32 * Transform<TR>::kOut);
    u32 n = (g.tiles + 255) / 256, more = n > g.tiles / 32 ? n : g.tiles / 32;
    n = umin((n + 3) & ~3u, more ? more : 1);
    g.seg = (g.tiles + n - 1) / n;
    g.segs = g.tiles ? (g.tiles + g.seg - 1) / g.seg : 0;
    return g;
}

OW_DEV u32 round_up_to_16(u32 n) { return (n + 15) & ~15u; }

OW_DEV u32 byte_of(u32x2 v, u32 i) { return (i < 4 ? v.x : v.y) >> (8 * (i & 3)) & 255; }

// x16_tables writes the coding tables of a model and its buckets to shared memory.
OW_COLD void x16_tables(u32 shared, const X16Model& m, u32 divider, u32 alias) {
    u32 first = lane_id() < 16 ? m.freq : 0;  // becomes the number of slots of all symbols before this one
    OW_UNROLL(1)
    for (u32 d = 1; d < 16; d *= 2) {
        u32 o = shfl(first, lane_id() - d);
        if (lane_id() >= d) first += o;
    }
    first -= m.freq;
    // The rank of a bucket's alias at position 0, as in x16_expand_table.
    u32 b = lane_id() & 15, other = shfl(alias, b), div = shfl(divider, b), bias = shfl(divider, other) - div;
    OW_UNROLL(1)
    for (u32 i = 0; i < 15; i++) {
        u32 d = shfl(divider, i), a = shfl(alias, i);
        if (i < b && a == other && d < 16) bias += 16 - d;
    }
    // Two lanes per bucket, eight slots per lane.
    u32 mine = lane_id() >> 1, r = 8 * (lane_id() & 1);
    u32 d = shfl(divider, mine), up = shfl(bias, mine);
    u32 own = shfl(first, mine), of_alias = shfl(first, shfl(alias, mine));
    OW_UNROLL(1)
    for (u32 i = 0; i < 8; i++, r++) {
        sts8(shared + kSlots + ((r < d ? own + r : of_alias + r + up) & 255), 16 * mine + r);
    }
    u32 f = m.freq ? m.freq : 1, inverse = f == 1 ? ~0u : (u32)(0x100000000ull / f);
    u32 entry = m.freq | (shared + kSlots + first) << 16 | (lane_id() == m.escape ? 256 : 0);
    // All values get the escape symbol's entry. The listed values are then overwritten.
    u32 from = m.escape == kNone ? 0 : m.escape, rest = shfl(entry, from), rest_inverse = shfl(inverse, from);
    OW_UNROLL(1)
    for (u32 v = lane_id(); v < 256; v += 32) sts64(shared + kEntries + 8 * v, {rest, rest_inverse});
    syncwarp();
    if (lane_id() < 16 && m.freq && lane_id() != m.escape) sts64(shared + kEntries + 8 * m.value, {entry, inverse});
}

// An Encode is one warp's view of the item that its block encodes.
template <int TR> struct Encode {
    typedef Transform<TR> X;
    static constexpr u32 kUnit = X::kOut, kTile = 32 * X::kOut;
    ow_batch_item* item;
    const u8* src;
    u8* dst;
    u32 n, cap;  // bytes of the source, capacity of the destination
    u32 shared, warp_id, warps;
    X16Grid g;

    OW_METHOD Encode(ow_batch_item* item, u32 shared, u32 warp_id, u32 warps)
        : item(item), shared(shared), warp_id(warp_id), warps(warps) {
        ow_batch_item it = *item;
        src = (const u8*)(uintptr_t)it.src;
        dst = (u8*)(uintptr_t)it.dst;
        n = (u32)it.src_len;
        cap = it.dst_cap < kMostChunk ? (u32)it.dst_cap : kMostChunk;
        g = x16_grid<TR>(n);
    }

    OW_METHOD void refuse(u32 status) const {
        syncwarp();  // all lanes have read the state
        if (lane_id() == 0) {
            item->written = 0;
            item->status = status;
            sts32(shared + kState, kRefused);
        }
    }

    OW_METHOD void clear_counts() const {
        OW_UNROLL(1)
        for (u32 i = 32 * warp_id + lane_id(); i < 2048; i += 32 * warps) sts32(shared + kCounts + 4 * i, 0);
        if (warp_id == 0 && lane_id() == 0) sts32(shared + kState, kCoded);
    }

    OW_METHOD void survey_values() const {
        u32 all = ~0u, any = 0, counts = shared + kCounts + 4 * (lane_id() & 7);
        OW_UNROLL(1)
        for (u32 t = warp_id; t < g.tiles; t += warps) {
            Unit u = load_unit<TR>(src + (u64)t * kTile + lane_id() * kUnit);
            u32x2 v = symbols_of_unit<TR>(u);
            for (u32 i = 0; i < kUnit / 4; i++) all &= u.w[i], any |= u.w[i];
            OW_UNROLL(8)
            for (u32 i = 0; i < 8; i++) increment32(counts + 32 * byte_of(v, i));
        }
        OW_UNROLL(1)
        for (u32 d = 16; d; d /= 2) {
            all &= shfl(all, lane_id() ^ d);
            any |= shfl(any, lane_id() ^ d);
        }
        if (lane_id() == 0) {
            sts32(shared + kAll + 4 * warp_id, all);
            sts32(shared + kAny + 4 * warp_id, any);
        }
    }

    OW_METHOD void sum_counts() const {
        OW_UNROLL(1)
        for (u32 v = 32 * warp_id + lane_id(); v < 256; v += 32 * warps) {
            u32 s = 0;
            for (u32 i = 0; i < 8; i++) s += lds32(shared + kCounts + 32 * v + 4 * i);
            sts32(shared + kBins + 4 * v, s);
        }
    }

    OW_METHOD void fit_model() const {
        u32 all = ~0u, any = 0;
        for (u32 i = 0; i < warps; i++) {
            all &= lds32(shared + kAll + 4 * i);
            any |= lds32(shared + kAny + 4 * i);
        }
        X16Model m = x16_fit(shared + kBins, 256 * g.tiles, !X::kEscapes);
        u32 limit = (u32)dmul(0.99, (double)n);
        if (m.one == kNone && 96 + 136 * g.segs + (u64)(m.bits * 0.125) > limit) {
            refuse(OW_BATCH_GAIN);
            return;
        }
        u32 divider = 0, alias = 0;
        if (m.one == kNone) {
            x16_buckets(m.freq, divider, alias);
            x16_tables(shared, m, divider, alias);
        }
        // A plane is constant if its bits are the same in all elements.
        all = fold_word_to_element<TR, true>(all);
        any = fold_word_to_element<TR, false>(any);
        Raw<X::kPlanes> same = planes_of_unit<TR>(broadcast_element<TR>(all)), differ = planes_of_unit<TR>(broadcast_element<TR>(all ^ any));
        u32 constant = 0;
        for (int i = 0; i < X::kPlanes; i++) constant |= (differ.p[i].x == 0) << i;
        if (lane_id() < 24) sts32(shared + kHead + 4 * lane_id(), 0);
        syncwarp();
        if (lane_id() == 0) {
            sts32(shared + kState, m.one == kNone ? (u32)kCoded : (u32)kOneSymbol);
            sts32(shared + kEscapes, m.escape != kNone);
            sts8(shared + kHead, m.one != kNone);
            sts8(shared + kHead + 1, m.one == kNone ? 0 : m.one);
            sts8(shared + kHead + 2, constant);
            sts8(shared + kHead + 3, m.escape == kNone ? 0 : m.escape + 1);
            sts32(shared + kHead + 4, g.tiles);
            for (int i = 0; i < X::kPlanes; i++) {
                if (constant >> i & 1) sts8(shared + kHead + 8 + i, same.p[i].x & ((1u << X::plane_bits(i)) - 1));
            }
        }
        if (lane_id() < 16) {
            sts8(shared + kHead + 16 + lane_id(), m.value);
            if (m.one == kNone) {
                sts8(shared + kHead + 32 + lane_id(), m.freq);
                sts8(shared + kHead + 48 + lane_id(), divider);
                sts8(shared + kHead + 64 + lane_id(), alias);
            }
        }
    }

    // code_symbol changes the state x to x / f << 8 | slot(x mod f). The product with the
    // inverse is the quotient or one less.
    OW_DEV void code_symbol(u32& x, u32x2 entry) {
        u32 f = entry.x & 255, q = mulhi(x, entry.y), r = x - q * f;
        if (r >= f) q++, r -= f;
        x = q << 8 | lds8((entry.x >> 16) + r);
    }

    // code_segment codes segment s, last symbol first. With WRITE it writes the segment and
    // its planes. Otherwise it only counts words and escapes.
    template <bool WRITE> OW_METHOD void code_segment(u32 s) const {
        u32 first = s * g.seg, t = umin(first + g.seg, g.tiles), entries = shared + kEntries;
        const u8* from = src + lane_unit() * kUnit;
        u8* words = nullptr;
        u32x2 place = {0, 0};
        if (WRITE) {
            place = {reload32(dst + 96 + 8 * s), reload32(dst + 100 + 8 * s)};
            words = dst + place.x + 128 + 2 * lds32(shared + kCounts + 8 * s);
        }
        u32 x = 1 << 16, emitted = 0, escapes = 0, below = lanes_below();
        bool listed = lds32(shared + kEscapes);
        u32 constant = lds32(shared + kHead) >> 16 & 255;
        Unit next = load_unit<TR>(from + (u64)(t - 1) * kTile);
        OW_UNROLL(1)
        for (;;) {
            Unit u = next;
            bool more = --t > first;
            if (more) next = load_unit<TR>(from + (u64)(t - 1) * kTile);
            u32x2 v = symbols_of_unit<TR>(u);
            if (WRITE) write_planes(u, t, lane_unit(), constant);
            OW_UNROLL(4)
            for (int i = 6; i >= 0; i -= 2) {
                u32x2 a = lds64(entries + 8 * byte_of(v, i)), b = lds64(entries + 8 * byte_of(v, i + 1));
                bool full = x >= ((a.x & 255) * (b.x & 255)) << 16;
                if (WRITE) {
                    u32 who = ballot(full);
                    words -= 2 * popc(who);
                    if (full) stg16(words + 2 * popc(who & below), x & 0xffff);
                } else {
                    emitted += full;
                    if (listed) escapes += (a.x >> 8 & 1) + (b.x >> 8 & 1);
                }
                if (full) x >>= 16;
                code_symbol(x, b);
                code_symbol(x, a);
            }
            if (!more) break;
        }
        if (WRITE) {
            stg32(dst + place.x + 4 * lane_id(), x);
            write_escapes(s, place);
        } else {
            OW_UNROLL(1)
            for (u32 d = 16; d; d /= 2) {
                emitted += shfl(emitted, lane_id() ^ d);
                escapes += shfl(escapes, lane_id() ^ d);
            }
            if (lane_id() == 0) sts64(shared + kCounts + 8 * s, {emitted, escapes});
        }
    }

    // write_escapes writes a segment's escapes and padding, which follow its words.
    OW_METHOD void write_escapes(u32 s, u32x2 place) const {
        u32 at = place.x + 128 + 2 * lds32(shared + kCounts + 8 * s), end = at + 3 * place.y, done = 0;
        OW_UNROLL(1)
        for (u32 t = s * g.seg; done < place.y; t++) {
            // Here each lane loads units in element order, not in the order of lane_unit.
            u32x2 v = symbols_of_unit<TR>(load_unit<TR>(src + (u64)t * kTile + lane_id() * kUnit));
            u32 mask = 0;
            for (u32 i = 0; i < 8; i++) mask |= (lds32(shared + kEntries + 8 * byte_of(v, i)) >> 8 & 1) << i;
            if (!ballot(mask)) continue;
            u32 mine = popc(mask), upto = mine;
            OW_UNROLL(1)
            for (u32 d = 1; d < 32; d *= 2) {
                u32 o = shfl(upto, lane_id() - d);
                if (lane_id() >= d) upto += o;
            }
            u32 k = done + upto - mine;
            for (u32 i = 0; i < 8; i++) {
                if (!(mask >> i & 1)) continue;
                stg16(dst + at + 2 * k, 256 * (t - s * g.seg) + 8 * lane_id() + i);
                stg8(dst + at + 2 * place.y + k, byte_of(v, i));
                k++;
            }
            done += shfl(upto, 31);
        }
        if (lane_id() < round_up_to_16(end) - end) stg8(dst + end + lane_id(), 0);
    }

    // write_planes writes the plane bytes of unit `unit` of tile t.
    OW_METHOD void write_planes(const Unit& u, u32 t, u32 unit, u32 constant) const {
        if (X::kPlanes == 0) return;
        Raw<X::kPlanes> r = planes_of_unit<TR>(u);
        u8* to = dst + lds32(shared + kPlanes);
        for (int i = 0; i < X::kPlanes; i++) {
            u32 w = X::plane_bits(i);
            if (constant >> i & 1) continue;
            u8* p = to + (u64)(32 * t + unit) * w;
            if (w == 8) stg64(p, r.p[i]);
            if (w == 4) stg32(p, r.p[i].x);
            if (w == 1) stg8(p, r.p[i].x);
            to += (u64)32 * w * g.tiles;
        }
    }

    OW_METHOD void lay_out_chunk() const {
        bool coded = lds32(shared + kState) == kCoded;
        u32 at = 96, segs = coded ? g.segs : 0, constant = lds32(shared + kHead) >> 16 & 255;
        if (coded) {
            at = round_up_to_16(96 + 8 * (segs + 1));
            OW_UNROLL(1)
            for (u32 s = lane_id(); s - lane_id() < segs; s += 32) {
                u32x2 l = s < segs ? lds64(shared + kCounts + 8 * s) : u32x2{0, 0};
                u32 size = s < segs ? round_up_to_16(128 + 2 * l.x + 3 * l.y) : 0;
                OW_UNROLL(1)
                for (u32 d = 16; d; d /= 2) size += shfl(size, lane_id() ^ d);
                at += size;
            }
        }
        u32 planes = at, total = at, tail = n - g.tiles * kTile;
        for (int i = 0; i < X::kPlanes; i++) total += constant >> i & 1 ? 0 : 32 * X::plane_bits(i) * g.tiles;
        total += tail;
        bool small = total <= (u32)dmul(0.99, (double)n);
        if (!small || total > cap) {
            refuse(small ? OW_BATCH_ROOM : OW_BATCH_GAIN);
            return;
        }
        if (lane_id() == 0) sts32(shared + kPlanes, planes);
        if (lane_id() < 24) stg32(dst + 4 * lane_id(), lds32(shared + kHead + 4 * lane_id()));
        if (coded) {
            at = round_up_to_16(96 + 8 * (segs + 1));
            OW_UNROLL(1)
            for (u32 s = lane_id(); s - lane_id() < segs; s += 32) {
                u32x2 l = s < segs ? lds64(shared + kCounts + 8 * s) : u32x2{0, 0};
                u32 size = s < segs ? round_up_to_16(128 + 2 * l.x + 3 * l.y) : 0, upto = size;
                OW_UNROLL(1)
                for (u32 d = 1; d < 32; d *= 2) {
                    u32 o = shfl(upto, lane_id() - d);
                    if (lane_id() >= d) upto += o;
                }
                if (s < segs) stg64(dst + 96 + 8 * s, {at + upto - size, l.y});
                at += shfl(upto, 31);
            }
            if (lane_id() == 0) {
                stg64(dst + 96 + 8 * segs, {planes, 0});
                if (segs % 2 == 0) stg64(dst + 104 + 8 * segs, {0, 0});
            }
        }
        OW_UNROLL(1)
        for (u32 i = lane_id(); i < tail; i += 32) stg8(dst + total - tail + i, ldg8(src + n - tail + i));
        if (lane_id() == 0) {
            item->written = total;
            item->status = 0;
            item->arg = TR | g.seg << 16;
        }
    }

    OW_METHOD void do_phase(u32 phase) const {
        if (phase == 0) return clear_counts();
        // Only warp 0 runs phases 3 and 5. The others return before they read the state, because
        // warp 0 may change it.
        if ((phase == 3 || phase == 5) && warp_id) return;
        u32 state = lds32(shared + kState);
        if (state == kRefused) return;
        switch (phase) {
            case 1: return survey_values();
            case 2: return sum_counts();
            case 3: return fit_model();
            case 4:
                OW_UNROLL(1)
                for (u32 s = warp_id; s < g.segs && state == kCoded; s += warps) code_segment<false>(s);
                return;
            case 5: return lay_out_chunk();
            default:
                OW_UNROLL(1)
                for (u32 s = warp_id; s < g.segs && state == kCoded; s += warps) code_segment<true>(s);
                if (state != kOneSymbol) return;
                u32 constant = lds32(shared + kHead) >> 16 & 255;
                OW_UNROLL(1)
                for (u32 t = warp_id; t < g.tiles; t += warps) {
                    write_planes(load_unit<TR>(src + (u64)t * kTile + lane_id() * kUnit), t, lane_id(), constant);
                }
        }
    }
};

// reason_not_to_encode returns the status of an item that cannot be encoded, or 0.
OW_DEV u32 reason_not_to_encode(const ow_batch_item& it) {
    u32 tr = it.arg & 0xffff;
    if (tr < OW_BF16 || tr > OW_BYTES || it.src_len > kMostChunk || (it.src | it.dst) % 16) return OW_BATCH_ARG;
    u32 tile = tr == OW_FP32 ? 1024 : tr <= OW_FP16 ? 512 : tr == OW_NIBBLES ? 128 : 256;
    return it.src_len < tile ? OW_BATCH_GAIN : 0;
}

}  // namespace ow
#endif
