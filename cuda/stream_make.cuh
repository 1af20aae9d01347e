// Writes X16 streams on the device (gosrc/nvcomp/native.go, x16.go). It fills rows from
// contents and, after all rows are encoded, lays out the streams and copies the blocks to
// their offsets. If the blocks equal those of the host's encoder, so do the streams.
#ifndef OVERWIRE_STREAM_MAKE_CUH
#define OVERWIRE_STREAM_MAKE_CUH

#include "stream.cuh"

namespace ow {

OW_DEV u32 stream_chunk_bytes(const ow_stream& stream, u32 index) {
    u64 left = stream.size - (u64)index * stream.chunk;
    return (u32)(left < stream.chunk ? left : stream.chunk);
}

// fill_row_to_encode fills a row with a chunk of content and the space for its block.
OW_DEV void fill_row_to_encode(const ow_stream_head* head, ow_batch_item* rows, u32 row) {
    ow_stream stream = stream_list(head)[find_stream(head, row)];
    u32 index = row - stream.first;
    rows[row] = {stream.src + (u64)index * stream.chunk, stream_chunk_bytes(stream, index), head->scratch + row * head->slot, head->slot, 0, 0, stream.arg};
}

// is_row_plain tells whether the stream stores the raw bytes of a row's chunk.
OW_DEV bool is_row_plain(const ow_batch_item& it, u32 transform) { return !transform || it.status == OW_BATCH_GAIN; }

OW_DEV void store_aligned64(u8* p, u64 v) { stg64(p, {(u32)v, (u32)(v >> 32)}); }

// lay_out_stream sets the destination and length of each row, writes the stream's tables and
// header, and reports the stream's length to the host.
OW_DEV void lay_out_stream(const ow_stream_head* head, ow_batch_item* rows, u32 index, u32* status) {
    ow_stream stream = stream_list(head)[index];
    u8* dst = (u8*)(uintptr_t)stream.dst;
    bool native = stream.kind == OW_STREAM_NATIVE;
    u32 n = native && !stream.size ? 0 : stream.rows;
    // A native payload begins 8 bytes before a multiple of 16, so blocks are aligned after their heads.
    u64 front = native ? kNativeHead + 16 * (u64)n + 8 : stream.kind == OW_STREAM_SIZED ? 8 : 0, off = 0;
    bool bad = front > stream.stored;
    for (u32 base = 0; base < n && !bad; base += 32) {
        u32 row = base + lane_id(), bytes = 0, stored = 0;
        bool wrong = false;
        if (row < n) {
            const ow_batch_item& it = rows[stream.first + row];
            bool plain = is_row_plain(it, stream.arg);
            wrong = !plain && it.status;
            stored = kBlockHead + (plain ? (u32)it.src_len : (u32)it.written);
            bytes = native ? (stored + 15) & ~15u : stored;
        }
        if (ballot(wrong) && lane_id() == 0) atomic_or(status + index, OW_STREAM_DATA);
        u32 sum = bytes;
        for (u32 d = 1; d < 32; d *= 2) {
            u32 o = shfl(sum, lane_id() - d);
            if (lane_id() >= d) sum += o;
        }
        u64 at = off + sum - bytes;
        off += shfl(sum, 31);
        bad = front + off > stream.stored;
        if (row < n) {
            if (native) {
                store_aligned64(dst + kNativeHead + 8 * (u64)row, at);
                store_aligned64(dst + kNativeHead + 8 * ((u64)n + row), stored);
            }
            rows[stream.first + row].dst = stream.dst + front + at;
            rows[stream.first + row].dst_cap = bad ? 0 : stored;
        }
    }
    syncwarp();  // all rows are written
    if (lane_id()) return;
    if (bad) {
        for (u32 row = 0; row < n; row++) rows[stream.first + row].dst_cap = 0;
        atomic_or(status + index, OW_STREAM_ROOM);
        return;
    }
    ow_stream_peek_t* out = (ow_stream_peek_t*)((u8*)status + head->answers) + index;
    *out = {front + off, stream.chunk, stream.format, 0};
    if (stream.kind == OW_STREAM_SIZED) store_aligned64(dst, stream.size);
    if (!native) return;
    for (u32 offset = 0; offset < kNativeHead; offset += 8) store_aligned64(dst + offset, 0);
    store_aligned64(dst + front - 8, 0);
    stg32(dst, OW_STREAM_MAGIC);
    stg8(dst + 4, 1);
    stg8(dst + 6, stream.format);
    store_aligned64(dst + 8, off);
    store_aligned64(dst + 16, stream.size);
    store_aligned64(dst + 24, n);
    stg8(dst + 32, 1);
    store_aligned64(dst + 48, stream.chunk);
    stg32(dst + 56, (u32)front);
}

// write_row_share writes a warp's share of a row: head, block and padding.
OW_DEV void write_row_share(const ow_stream_head* head, const ow_batch_item* rows, u32 job, u32*) {
    u32 split = head->split, row = job / split, share = job % split;
    ow_stream stream = stream_list(head)[find_stream(head, row)];
    ow_batch_item item = rows[row];
    if (item.dst_cap == 0 || (stream.kind == OW_STREAM_NATIVE && !stream.size)) return;
    bool plain = is_row_plain(item, stream.arg);
    u32 n = (u32)item.dst_cap - kBlockHead;
    copy_share(item.dst + kBlockHead, plain ? item.src : head->scratch + row * head->slot, n, share, split);
    if (share) return;
    u8* dst = (u8*)(uintptr_t)item.dst;
    if (lane_id() == 0) {
        u64 h = (u64)stream_chunk_bytes(stream, row - stream.first) << 32;
        if (!plain) h |= 1 | (item.arg & 255) << 8 | (item.arg & 0xffff0000);
        for (u32 i = 0; i < kBlockHead; i++) stg8(dst + i, (u32)(h >> (8 * i)) & 255);
    }
    if (stream.kind == OW_STREAM_NATIVE && item.dst_cap % 16) {
        u32 pad = 16 - item.dst_cap % 16;
        if (lane_id() < pad) stg8(dst + item.dst_cap + lane_id(), 0);
    }
}

}  // namespace ow
#endif
