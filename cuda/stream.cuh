// Parses bitstreams on the device and fills a row for each chunk.
// gosrc/nvcomp/native.go describes the layout. One thread handles one row, without warp
// operations or shared memory. In the X16 kernel, each warp parses the row that it decodes.
#ifndef OVERWIRE_STREAM_CUH
#define OVERWIRE_STREAM_CUH

#include "abi_stream.h"
#include "x16_vet.cuh"

namespace ow {

OW_DEV const ow_stream* stream_list(const ow_stream_head* head) { return (const ow_stream*)(head + 1); }

// find_stream returns the index of the stream that contains a row.
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

OW_DEV u64 load_aligned64(const u8* p) {
    u32x2 v = ldg64(p);
    return (u64)v.y << 32 | v.x;
}

// Loads n bytes at any alignment, little-endian.
OW_DEV u64 load_bytes(const u8* p, u32 n) {
    u64 v = 0;
    for (u32 i = 0; i < n; i++) v |= (u64)ldg8(p + i) << (8 * i);
    return v;
}

// Bytes of a native stream's header. The stream's tables follow the header.
constexpr u32 kNativeHead = 64;

struct Native {
    u64 payload, size, chunks, chunk;
    u32 offset, format;
};

// open_native reads and checks the header of a native stream of n bytes. src is a
// multiple of 8. Returns 0 or status bits.
OW_DEV u32 open_native(Native& header, const u8* src, u64 n) {
    if (n < kNativeHead) return OW_STREAM_HEADER;
    u32 magic = ldg32(src), version = ldg8(src + 4), starts = ldg8(src + 32), stored = ldg8(src + 44), content = ldg8(src + 45);
    header.format = ldg8(src + 6);
    header.payload = load_aligned64(src + 8);
    header.size = load_aligned64(src + 16);
    header.chunks = load_aligned64(src + 24);
    header.chunk = load_aligned64(src + 48);
    header.offset = ldg32(src + 56);
    u32 row = 16 + (stored ? 4 : 0) + (content ? 4 : 0);
    if (magic != OW_STREAM_MAGIC || version != 1) return OW_STREAM_HEADER;
    if (header.offset > n || header.payload > n - header.offset || header.size >> 62 || header.chunk >> 40) return OW_STREAM_HEADER;
    if (header.chunks > n / row || kNativeHead + header.chunks * row > header.offset) return OW_STREAM_HEADER;
    if (header.size == 0) return header.chunks ? (u32)OW_STREAM_HEADER : 0;
    if (header.chunk == 0 || (header.size + header.chunk - 1) / header.chunk != header.chunks || !starts) return OW_STREAM_HEADER;
    return 0;
}

// A stored block, and the offset and size of its content.
struct Block {
    const u8* src;
    u64 stored, at, size;
};

// sized_prefix_bytes returns the size of the length field that precedes the block of a sized stream.
OW_DEV u32 sized_prefix_bytes(const ow_stream& stream) { return stream.format == OW_STREAM_LZ4 ? 4 : 8; }

// find_block finds block number `index` of a stream. If the stream is empty and has no block,
// it leaves block.stored unchanged. Returns 0 or status bits.
OW_DEV u32 find_block(Block& block, const ow_stream& stream, u32 index) {
    const u8* src = (const u8*)(uintptr_t)stream.src;
    block.at = (u64)index * stream.chunk;
    block.size = stream.size - block.at < stream.chunk ? stream.size - block.at : stream.chunk;
    if (stream.kind == OW_STREAM_NATIVE) {
        Native header;
        if (stream.src % 8) return OW_STREAM_PLACE;
        u32 bad = open_native(header, src, stream.stored);
        if (bad) return bad;
        if (header.format != stream.format || header.size != stream.size) return OW_STREAM_OTHER;
        if (header.size == 0) return 0;  // no block
        if (header.chunk != stream.chunk || header.chunks != stream.rows) return OW_STREAM_OTHER;
        const u8* tables = src + kNativeHead;
        u64 at = load_aligned64(tables + 8 * (u64)index), n = load_aligned64(tables + 8 * (header.chunks + index));
        if (at > header.payload || n > header.payload - at) return OW_STREAM_CHUNK;
        block.src = src + header.offset + at;
        block.stored = n;
        return n ? 0 : OW_STREAM_CHUNK;
    }
    u32 prefix = stream.kind == OW_STREAM_RAW ? 0 : sized_prefix_bytes(stream);
    if (stream.stored < prefix) return OW_STREAM_HEADER;
    if (prefix && load_bytes(src, prefix) != stream.size) return OW_STREAM_OTHER;
    block.src = src + prefix;
    block.stored = stream.stored - prefix;
    return block.stored ? 0 : OW_STREAM_CHUNK;
}

// The head of an X16 block (gosrc/nvcomp/x16.go): u8 codec, u8 transform,
// u16 tiles per segment, u32 bytes of content.
constexpr u32 kBlockHead = 8;
// Here, ow_x16_chunk.zero is the transform of a block, kPlain for raw bytes, or kDead if
// there is nothing to decode.
constexpr u32 kPlain = 0, kDead = 0xffff;

// x16_open_block checks a block's head and fills in its chunk. Returns 0 or status bits.
OW_DEV u32 x16_open_block(ow_x16_chunk& chunk, const Block& block, u64 dst) {
    if (block.stored < kBlockHead || block.stored >> 31) return OW_STREAM_CHUNK;
    u64 head = load_bytes(block.src, kBlockHead);
    u32 codec = head & 255, transform = head >> 8 & 255;
    chunk.src = (u64)(uintptr_t)block.src + kBlockHead;
    chunk.dst = dst + block.at;
    chunk.stored = (u32)block.stored - kBlockHead;
    chunk.logical = (u32)(head >> 32);
    chunk.tiles = (uint16_t)(head >> 16);
    chunk.zero = (uint16_t)transform;
    if (chunk.logical != block.size) return OW_STREAM_OTHER;
    if (codec == 0) return transform || chunk.tiles || chunk.stored != chunk.logical ? OW_STREAM_CHUNK : 0;
    if (codec != 1 || transform < OW_BF16 || transform > OW_BYTES || chunk.stored < kX16Header || chunk.tiles == 0 || chunk.tiles > 256) return OW_STREAM_CHUNK;
    return (chunk.src | chunk.dst) % 16 ? OW_STREAM_PLACE : 0;
}

// fill_row_to_decode fills a row for a decoder. The row of an invalid stream is an empty item.
OW_DEV void fill_row_to_decode(const ow_stream_head* head, ow_batch_item* rows, u32 row, u32* status) {
    u32 index = find_stream(head, row);
    ow_stream stream = stream_list(head)[index];
    Block block = {nullptr, 0, 0, 0};
    u32 bad = find_block(block, stream, row - stream.first);
    ow_batch_item it = {0, 0, 0, 0, 0, 0, stream.arg};
    if (!bad) {
        it.src = (u64)(uintptr_t)block.src;
        it.src_len = block.stored;
        it.dst = stream.dst + block.at;
        it.dst_cap = block.size;
    }
    rows[row] = it;
    if (bad) atomic_or(status + index, bad);
}

// check_decoded_row sets OW_STREAM_DATA if a row was not decoded completely.
OW_DEV void check_decoded_row(const ow_stream_head* head, const ow_batch_item* rows, u32 row, u32* status) {
    const ow_batch_item& it = rows[row];
    if (it.src_len && (it.status || it.written != it.dst_cap)) atomic_or(status + find_stream(head, row), OW_STREAM_DATA);
}

// peek_stream reads the content length of a stream. Native and sized streams contain it, and
// so do raw X16 and Snappy blocks. Other raw blocks get OW_STREAM_OTHER.
OW_DEV void peek_stream(const ow_stream_head* head, ow_stream_peek_t* out, u32 index) {
    const ow_stream& stream = stream_list(head)[index];
    const u8* src = (const u8*)(uintptr_t)stream.src;
    ow_stream_peek_t answer = {0, 0, stream.format, 0};
    if (stream.kind == OW_STREAM_NATIVE) {
        Native header;
        answer.status = stream.src % 8 ? (u32)OW_STREAM_PLACE : open_native(header, src, stream.stored);
        if (!answer.status) answer.size = header.size, answer.chunk = header.chunk, answer.format = header.format;
    } else if (stream.kind == OW_STREAM_SIZED) {
        u32 prefix = sized_prefix_bytes(stream);
        if (stream.stored < prefix) answer.status = OW_STREAM_HEADER;
        else answer.size = load_bytes(src, prefix);
    } else if (stream.format == OW_STREAM_X16) {
        if (stream.stored < kBlockHead) answer.status = OW_STREAM_HEADER;
        else answer.size = load_bytes(src + 4, 4);
    } else if (stream.format == OW_STREAM_SNAPPY) {
        u32 k = 0, byte = 128;
        for (; byte & 128 && k < 5 && k < stream.stored; k++) answer.size |= (u64)((byte = ldg8(src + k)) & 127) << (7 * k);
        if (byte & 128 || answer.size >> 32) answer.status = OW_STREAM_HEADER;
    } else {
        answer.status = OW_STREAM_OTHER;
    }
    out[index] = answer;
}

// copy_share copies a warp's share of `bytes` bytes. Source and destination do not overlap.
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

// An X16Kept is a segment job. Its chunk is in the warp's shared memory.
struct X16Kept {
    u32 at, s;
    OW_METHOD ow_x16_chunk chunk() const {
        u32x4 a = lds128(at), b = lds128(at + 16);
        return {(u64)a.y << 32 | a.x, (u64)a.w << 32 | a.z, b.x, b.y, (uint16_t)b.z, (uint16_t)(b.z >> 16), b.w};
    }
    OW_METHOD u32 seg() const { return s; }
};

template <int TR> OW_DEV void decode_segments_of_share(u32 kept, u32 share, u32 split, u32* status, X16Place place) {
    ow_x16_chunk chunk = X16Kept{kept, 0}.chunk();
    u32 total = chunk.logical / (32 * Transform<TR>::kOut);
    u32 segs = (total + chunk.tiles - 1) / chunk.tiles;
    // One warp per chunk runs the checks that the Go decoder runs before decoding.
    if (share == 0 && total) {
        u32 bad = x16_vet(chunk, x16_form<TR>());
        if (bad && lane_id() == 0) atomic_or(status + chunk.status, bad);
    }
    bool table = false;
    OW_UNROLL(1)
    for (u32 seg = share; seg < (segs ? segs : 1); seg += split) {
        x16_decode_segment<TR>(X16Kept{kept, seg}, status, place, table);
        syncwarp();  // the next segment reuses the ring
    }
}

// decode_share decodes a warp's share of a row: every split-th segment. `kept` is the
// shared address of 32 bytes for the warp's chunk.
OW_DEV void decode_share(const ow_stream_head* head, u32 job, u32* status, X16Place place, u32 kept) {
    u32 split = head->split, row = job / split, share = job % split, index = find_stream(head, row);
    ow_stream stream = stream_list(head)[index];
    Block block = {nullptr, 0, 0, 0};
    ow_x16_chunk chunk = {0, 0, 0, 0, 0, (uint16_t)kDead, index};
    u32 bad = find_block(block, stream, row - stream.first);
    if (!bad && block.stored) {
        bad = x16_open_block(chunk, block, stream.dst);
        if (bad) chunk.zero = (uint16_t)kDead;
    }
    if (bad && share == 0 && lane_id() == 0) atomic_or(status + index, bad);
    if (lane_id() == 0) {
        sts128(kept, {(u32)chunk.src, (u32)(chunk.src >> 32), (u32)chunk.dst, (u32)(chunk.dst >> 32)});
        sts128(kept + 16, {chunk.stored, chunk.logical, chunk.tiles | (u32)chunk.zero << 16, chunk.status});
    }
    syncwarp();
    switch (chunk.zero) {
        case kPlain: copy_share(chunk.dst, chunk.src, chunk.logical, share, split); break;
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
