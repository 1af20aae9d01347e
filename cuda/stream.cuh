// Bitstreams opened on the device: from a stream's bytes to a row for each of its
// chunks. gosrc/nvcomp/native.go describes the layout. One thread a row, no warp
// operations, no shared memory; in the X16 kernel, where a warp has a share of a
// row, the warp opens it itself.
#ifndef OVERWIRE_STREAM_CUH
#define OVERWIRE_STREAM_CUH

#include "abi_stream.h"
#include "x16_vet.cuh"

namespace ow {

OW_DEV const ow_stream* stream_list(const ow_stream_head* head) { return (const ow_stream*)(head + 1); }

// find_stream finds the stream of a row: the last whose first row is not above.
OW_DEV u32 find_stream(const ow_stream_head* head, u32 row) {
    const ow_stream* s = stream_list(head);
    u32 lo = 0, hi = head->streams;
    while (hi - lo > 1) {
        u32 mid = (lo + hi) / 2;
        if (s[mid].first <= row) lo = mid;
        else hi = mid;
    }
    return lo;
}

OW_DEV u64 load64(const u8* p) {
    u32x2 v = ldg64(p);
    return (u64)v.y << 32 | v.x;
}

// Reads of any alignment, little-endian.
OW_DEV u64 load_bytes(const u8* p, u32 n) {
    u64 v = 0;
    for (u32 i = 0; i < n; i++) v |= (u64)ldg8(p + i) << (8 * i);
    return v;
}

// The size of a native stream's header; its tables follow.
constexpr u32 kNativeHead = 64;

struct Native {
    u64 payload, size, chunks, chunk;
    u32 offset, format;
};

// native_open reads the header of a native stream of n bytes. src is a multiple
// of 8.
OW_DEV u32 native_open(Native& h, const u8* src, u64 n) {
    if (n < kNativeHead) return OW_STREAM_HEADER;
    u32 magic = ldg32(src), version = ldg8(src + 4), starts = ldg8(src + 32), stored = ldg8(src + 44), content = ldg8(src + 45);
    h.format = ldg8(src + 6);
    h.payload = load64(src + 8);
    h.size = load64(src + 16);
    h.chunks = load64(src + 24);
    h.chunk = load64(src + 48);
    h.offset = ldg32(src + 56);
    u32 row = 16 + (stored ? 4 : 0) + (content ? 4 : 0);
    if (magic != OW_STREAM_MAGIC || version != 1) return OW_STREAM_HEADER;
    if (h.offset > n || h.payload > n - h.offset || h.size >> 62 || h.chunk >> 40) return OW_STREAM_HEADER;
    if (h.chunks > n / row || kNativeHead + h.chunks * row > h.offset) return OW_STREAM_HEADER;
    if (h.size == 0) return h.chunks ? (u32)OW_STREAM_HEADER : 0;
    if (h.chunk == 0 || (h.size + h.chunk - 1) / h.chunk != h.chunks || !starts) return OW_STREAM_HEADER;
    return 0;
}

// A stored block and the place of its content.
struct Block {
    const u8* src;
    u64 stored, at, size;
};

// sized_prefix is how many bytes precede the block of a sized stream: its length.
OW_DEV u32 sized_prefix(const ow_stream& s) { return s.format == OW_STREAM_LZ4 ? 4 : 8; }

// find_block finds block k of a stream; a missing block has no stored bytes.
// Returns bits of status.
OW_DEV u32 find_block(Block& b, const ow_stream& s, u32 k) {
    const u8* src = (const u8*)(uintptr_t)s.src;
    b.at = (u64)k * s.chunk;
    b.size = s.size - b.at < s.chunk ? s.size - b.at : s.chunk;
    if (s.kind == OW_STREAM_NATIVE) {
        Native h;
        if (s.src % 8) return OW_STREAM_PLACE;
        u32 bad = native_open(h, src, s.stored);
        if (bad) return bad;
        if (h.format != s.format || h.size != s.size) return OW_STREAM_OTHER;
        if (h.size == 0) return 0;  // no chunk
        if (h.chunk != s.chunk || h.chunks != s.rows) return OW_STREAM_OTHER;
        const u8* tables = src + kNativeHead;
        u64 at = load64(tables + 8 * (u64)k), n = load64(tables + 8 * (h.chunks + k));
        if (at > h.payload || n > h.payload - at) return OW_STREAM_CHUNK;
        b.src = src + h.offset + at;
        b.stored = n;
        return n ? 0 : OW_STREAM_CHUNK;
    }
    u32 prefix = s.kind == OW_STREAM_RAW ? 0 : sized_prefix(s);
    if (s.stored < prefix) return OW_STREAM_HEADER;
    if (prefix && load_bytes(src, prefix) != s.size) return OW_STREAM_OTHER;
    b.src = src + prefix;
    b.stored = s.stored - prefix;
    return b.stored ? 0 : OW_STREAM_CHUNK;
}

// The head of an X16 block (gosrc/nvcomp/x16.go): u8 codec, u8 transform,
// u16 tiles per segment, u32 bytes of content.
constexpr u32 kBlockHead = 8;
// A chunk's word `zero` says how its block is stored: with a transform, or as one
// of these.
constexpr u32 kPlain = 0, kDead = 0xffff;

// x16_block checks a block's head and returns its chunk.
OW_DEV u32 x16_block(ow_x16_chunk& c, const Block& b, u64 dst) {
    if (b.stored < kBlockHead || b.stored >> 31) return OW_STREAM_CHUNK;
    u64 head = load_bytes(b.src, kBlockHead);
    u32 codec = head & 255, transform = head >> 8 & 255;
    c.src = (u64)(uintptr_t)b.src + kBlockHead;
    c.dst = dst + b.at;
    c.stored = (u32)b.stored - kBlockHead;
    c.logical = (u32)(head >> 32);
    c.tiles = (uint16_t)(head >> 16);
    c.zero = (uint16_t)transform;
    if (c.logical != b.size) return OW_STREAM_OTHER;
    if (codec == 0) return transform || c.tiles || c.stored != c.logical ? OW_STREAM_CHUNK : 0;
    if (codec != 1 || transform < OW_BF16 || transform > OW_BYTES || c.stored < kX16Header || c.tiles == 0 || c.tiles > 256) return OW_STREAM_CHUNK;
    return (c.src | c.dst) % 16 ? OW_STREAM_PLACE : 0;
}

// open_row fills a row. The row of a bad stream does nothing.
OW_DEV void open_row(const ow_stream_head* head, ow_batch_item* rows, u32 row, u32* status) {
    u32 i = find_stream(head, row);
    ow_stream s = stream_list(head)[i];
    Block b = {nullptr, 0, 0, 0};
    u32 bad = find_block(b, s, row - s.first);
    ow_batch_item it = {0, 0, 0, 0, 0, 0, s.arg};
    if (!bad) {
        it.src = (u64)(uintptr_t)b.src;
        it.src_len = b.stored;
        it.dst = s.dst + b.at;
        it.dst_cap = b.size;
    }
    rows[row] = it;
    if (bad) atomic_or(status + i, bad);
}

// close_row checks that a row was decoded completely.
OW_DEV void close_row(const ow_stream_head* head, const ow_batch_item* rows, u32 row, u32* status) {
    const ow_batch_item& it = rows[row];
    if (it.src_len && (it.status || it.written != it.dst_cap)) atomic_or(status + find_stream(head, row), OW_STREAM_DATA);
}

// peek_stream returns the length of stream i's content if it is at a fixed offset:
// native and sized streams, and blocks of X16 and Snappy.
OW_DEV void peek_stream(const ow_stream_head* head, ow_stream_peek_t* out, u32 i) {
    const ow_stream& s = stream_list(head)[i];
    const u8* src = (const u8*)(uintptr_t)s.src;
    ow_stream_peek_t p = {0, 0, s.format, 0};
    if (s.kind == OW_STREAM_NATIVE) {
        Native h;
        p.status = s.src % 8 ? (u32)OW_STREAM_PLACE : native_open(h, src, s.stored);
        if (!p.status) p.size = h.size, p.chunk = h.chunk, p.format = h.format;
    } else if (s.kind == OW_STREAM_SIZED) {
        u32 prefix = sized_prefix(s);
        if (s.stored < prefix) p.status = OW_STREAM_HEADER;
        else p.size = load_bytes(src, prefix);
    } else if (s.format == OW_STREAM_X16) {
        if (s.stored < kBlockHead) p.status = OW_STREAM_HEADER;
        else p.size = load_bytes(src + 4, 4);
    } else if (s.format == OW_STREAM_SNAPPY) {
        u32 k = 0, byte = 128;
        for (; byte & 128 && k < 5 && k < s.stored; k++) p.size |= (u64)((byte = ldg8(src + k)) & 127) << (7 * k);
        if (byte & 128 || p.size >> 32) p.status = OW_STREAM_HEADER;
    } else {
        p.status = OW_STREAM_OTHER;
    }
    out[i] = p;
}

// copy_share copies a warp's share of `bytes` bytes that do not overlap.
OW_DEV void copy_share(u64 to, u64 from, u32 bytes, u32 share, u32 split) {
    const u8* src = (const u8*)(uintptr_t)from;
    u8* dst = (u8*)(uintptr_t)to;
    u32 unit = (from | to) % 16 == 0 ? 16 : (from | to) % 8 == 0 ? 8 : 1;
    u32 n = bytes / unit;
    for (u32 i = 32 * share + lane_id(); i < n; i += 32 * split) {
        if (unit == 16) stg128(dst + 16 * (u64)i, ldg128(src + 16 * (u64)i));
        else if (unit == 8) stg64(dst + 8 * (u64)i, ldg64(src + 8 * (u64)i));
        else stg8(dst + i, ldg8(src + i));
    }
    if (share == 0) {
        for (u32 i = n * unit + lane_id(); i < bytes; i += 32) stg8(dst + i, ldg8(src + i));
    }
}

// A chunk that its warp keeps in shared memory.
struct X16Kept {
    u32 at, s;
    OW_METHOD ow_x16_chunk chunk() const {
        u32x4 a = lds128(at), b = lds128(at + 16);
        return {(u64)a.y << 32 | a.x, (u64)a.w << 32 | a.z, b.x, b.y, (uint16_t)b.z, (uint16_t)(b.z >> 16), b.w};
    }
    OW_METHOD u32 seg() const { return s; }
};

template <int TR> OW_DEV void decode_segments_of_share(u32 kept, u32 share, u32 split, u32* status, X16Place place) {
    ow_x16_chunk c = X16Kept{kept, 0}.chunk();
    u32 total = c.logical / (32 * Transform<TR>::kOut);
    u32 segs = (total + c.tiles - 1) / c.tiles;
    // What the Go decoder checks before it decodes: one of the warps does.
    if (share == 0 && total) {
        u32 bad = x16_vet(c, x16_form<TR>());
        if (bad && lane_id() == 0) atomic_or(status + c.status, bad);
    }
    bool table = false;
    OW_UNROLL(1)
    for (u32 seg = share; seg < (segs ? segs : 1); seg += split) {
        x16_decode_segment<TR>(X16Kept{kept, seg}, status, place, table);
        syncwarp();  // the ring is the next segment's
    }
}

// decode_share decodes a warp's share of a row: every split-th segment. kept: shared
// address of 32 bytes of the warp's.
OW_DEV void decode_share(const ow_stream_head* head, u32 job, u32* status, X16Place place, u32 kept) {
    u32 split = head->split, row = job / split, share = job % split, i = find_stream(head, row);
    ow_stream s = stream_list(head)[i];
    Block b = {nullptr, 0, 0, 0};
    ow_x16_chunk c = {0, 0, 0, 0, 0, (uint16_t)kDead, i};
    u32 bad = find_block(b, s, row - s.first);
    if (!bad && b.stored) {
        bad = x16_block(c, b, s.dst);
        if (bad) c.zero = (uint16_t)kDead;
    }
    if (bad && share == 0 && lane_id() == 0) atomic_or(status + i, bad);
    if (lane_id() == 0) {
        sts128(kept, {(u32)c.src, (u32)(c.src >> 32), (u32)c.dst, (u32)(c.dst >> 32)});
        sts128(kept + 16, {c.stored, c.logical, c.tiles | (u32)c.zero << 16, c.status});
    }
    syncwarp();
    switch (c.zero) {
        case kPlain: copy_share(c.dst, c.src, c.logical, share, split); break;
        case OW_BF16: decode_segments_of_share<OW_BF16>(kept, share, split, status, place); break;
        case OW_FP16: decode_segments_of_share<OW_FP16>(kept, share, split, status, place); break;
        case OW_FP32: decode_segments_of_share<OW_FP32>(kept, share, split, status, place); break;
        case OW_E4M3: decode_segments_of_share<OW_E4M3>(kept, share, split, status, place); break;
        case OW_E5M2: decode_segments_of_share<OW_E5M2>(kept, share, split, status, place); break;
        case OW_INT8: decode_segments_of_share<OW_INT8>(kept, share, split, status, place); break;
        case OW_NIBBLES: decode_segments_of_share<OW_NIBBLES>(kept, share, split, status, place); break;
        case OW_BYTES: decode_segments_of_share<OW_BYTES>(kept, share, split, status, place); break;
    }
}

}  // namespace ow
#endif
