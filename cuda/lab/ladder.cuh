// The ladder's first rungs, bf16 only: what the production body was measured
// against while it was made. Kept simple; they trust their input (the lab gives
// corrupt chunks to the production body alone).
#ifndef OVERWIRE_LAB_LADDER_CUH
#define OVERWIRE_LAB_LADDER_CUH

#include "../x16_decode.cuh"

namespace ow {

// What rungs 1 to 3 have in common.
struct RungTile {
    u8* out;
    const u8* plane;
    u32 x;
};

OW_DEV void rung_open(RungTile& r, const X16Segment& s) {
    u32 unit = (lane() & 16) + 4 * (lane() & 3) + (lane() >> 2 & 3);
    r.out = s.dst + (u64)s.first * 512 + 16 * unit;
    r.plane = s.src + s.planes + s.first * 256 + 8 * unit;
    r.x = ldg32(s.src + s.words - 128 + 4 * lane());
}

OW_DEV void rung_patch(const X16Segment& s, u32 words) {
    if (s.escapes) x16_escapes<OW_BF16>(s, s.words + 2 * words);
}

// Kernel 1: 256 direct slots in shared memory, words by dependent global loads.
OW_DEV void rung1(const X16Segment& s, X16Place place) {
    RungTile r;
    x16_table<OW_BF16>(s, place.table);
    syncwarp();
    rung_open(r, s);
    const u8* from = s.src + s.words;
    u32 cursor = 0, limit = (s.end - s.words) / 2 - 1;
    for (u32 t = 0; t < s.tiles; t++) {
        Raw<1> raw;
        raw.p[0] = ldg64(r.plane + 256 * t);
        u32 e[8];
        for (int i = 0; i < 8; i++) {
            e[i] = lds32(place.table + 4 * (r.x & 255));
            r.x = (e[i] >> 24) * (r.x >> 8) + (e[i] >> 16 & 255);
            if (i % 2 == 0) continue;
            bool low = r.x < 0x10000;
            u32 need = ballot(low);
            if (low) r.x = r.x << 16 | *(const u16*)(from + 2 * umin(cursor + popc(need & lanes_below()), limit));
            cursor += popc(need);
        }
        Transform<OW_BF16>::store(r.out + 512 * t, e, raw);
    }
    rung_patch(s, cursor);
}

// Kernel 2: words staged in shared memory, two blocks of 512 bytes; the next
// block waits in registers.
OW_DEV void rung2(const X16Segment& s, X16Place place) {
    RungTile r;
    x16_table<OW_BF16>(s, place.table);
    rung_open(r, s);
    const u8* from = s.src + s.words;
    u32 bytes = s.end - s.words, ring = place.ring, cursor = 0;
    u32x4 ahead = {0, 0, 0, 0};
    for (u32 k = 0; k < 3; k++) {
        u32 at = 512 * k + 16 * lane();
        if (at < bytes) ahead = ldg128(from + at);
        if (k < 2) sts128(ring + at, ahead);
    }
    syncwarp();
    for (u32 t = 0; t < s.tiles; t++) {
        Raw<1> raw;
        raw.p[0] = ldg64(r.plane + 256 * t);
        u32 e[8];
        u32 block = cursor / 256;
        for (int i = 0; i < 8; i++) {
            e[i] = lds32(place.table + 4 * (r.x & 255));
            r.x = (e[i] >> 24) * (r.x >> 8) + (e[i] >> 16 & 255);
            if (i % 2 == 0) continue;
            bool low = r.x < 0x10000;
            u32 need = ballot(low);
            u32 w = lds16(ring + 2 * ((cursor + popc(need & lanes_below())) & 511));
            if (low) r.x = r.x << 16 | w;
            cursor += popc(need);
        }
        Transform<OW_BF16>::store(r.out + 512 * t, e, raw);
        if (cursor / 256 != block) {
            syncwarp();
            sts128(ring + 512 * (block & 1) + 16 * lane(), ahead);
            syncwarp();
            u32 at = 512 * (block + 3) + 16 * lane();
            if (at < bytes) ahead = ldg128(from + at);
        }
    }
    rung_patch(s, cursor);
}

// Kernel 3: no table in shared memory; lanes 0..15 hold the 16 alias buckets'
// own entries, lanes 16..31 the aliases'; two shuffles a symbol.
OW_DEV void rung3(const X16Segment& s, X16Place place) {
    RungTile r;
    u32 b = lane() & 15, value = header_byte(s, 16 + b), freq = header_byte(s, 32 + b);
    u32 div = header_byte(s, 48 + b), other = header_byte(s, 64 + b) & 15;
    u32 bias = shfl(div, other) - div;
    for (u32 i = 0; i < 15; i++) {
        u32 d = shfl(div, i), a = shfl(other, i);
        if (i < b && a == other && d < 16) bias += 16 - d;
    }
    u32 own = freq << 24 | value << 7, alias = shfl(own, other) | (bias & 255) << 16;
    u32 entry = lane() < 16 ? own : alias;
    rung_open(r, s);
    const u8* from = s.src + s.words;
    u32 bytes = s.end - s.words, ring = place.ring, cursor = 0;
    u32x4 ahead = {0, 0, 0, 0};
    for (u32 k = 0; k < 3; k++) {
        u32 at = 512 * k + 16 * lane();
        if (at < bytes) ahead = ldg128(from + at);
        if (k < 2) sts128(ring + at, ahead);
    }
    syncwarp();
    for (u32 t = 0; t < s.tiles; t++) {
        Raw<1> raw;
        raw.p[0] = ldg64(r.plane + 256 * t);
        u32 e[8];
        u32 block = cursor / 256;
        for (int i = 0; i < 8; i++) {
            u32 q = r.x & 15, bucket = r.x >> 4 & 15;
            u32 mine = q < shfl(div, bucket) ? 0 : 16;
            u32 v = shfl(entry, bucket + mine);
            e[i] = v;
            r.x = (v >> 24) * (r.x >> 8) + ((q + (v >> 16 & 255)) & 255);
            if (i % 2 == 0) continue;
            bool low = r.x < 0x10000;
            u32 need = ballot(low);
            u32 w = lds16(ring + 2 * ((cursor + popc(need & lanes_below())) & 511));
            if (low) r.x = r.x << 16 | w;
            cursor += popc(need);
        }
        Transform<OW_BF16>::store(r.out + 512 * t, e, raw);
        if (cursor / 256 != block) {
            syncwarp();
            sts128(ring + 512 * (block & 1) + 16 * lane(), ahead);
            syncwarp();
            u32 at = 512 * (block + 3) + 16 * lane();
            if (at < bytes) ahead = ldg128(from + at);
        }
    }
    rung_patch(s, cursor);
}

// rung_job runs rung N on one segment job.
template <int N>
OW_DEV void rung_job(const ow_x16_chunk* chunks, const ow_x16_seg* segs, u32 job, u32* status, X16Place place) {
    ow_x16_chunk c = chunks[segs[job].chunk];
    X16Segment s;
    u32 bad = x16_open<OW_BF16>(s, c, segs[job].seg);
    if (bad || !s.coded || header_byte(s, 2)) {
        if (lane() == 0) raise(status + c.status, OW_X16_LAYOUT);
        return;
    }
    if (N == 1) rung1(s, place);
    if (N == 2) rung2(s, place);
    if (N == 3) rung3(s, place);
}

}  // namespace ow
#endif
