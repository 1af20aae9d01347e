// X16 streams made on the device (gosrc/nvcomp/native.go, x16.go): rows from
// contents, then, when every row has its block, the layout, and the bytes in their
// places. The bytes are those of the host's encoder, if its blocks are the same.
#ifndef OVERWIRE_STREAM_MAKE_CUH
#define OVERWIRE_STREAM_MAKE_CUH

#include "stream.cuh"

namespace ow {

OW_DEV u32 stream_chunk(const ow_stream& s, u32 k) {
    u64 left = s.size - (u64)k * s.chunk;
    return (u32)(left < s.chunk ? left : s.chunk);
}

// open_row_to_encode fills a row: a chunk of content, and the space for its block.
OW_DEV void open_row_to_encode(const ow_stream_head* head, ow_batch_item* rows, u32 row) {
    ow_stream s = stream_list(head)[find_stream(head, row)];
    u32 k = row - s.first;
    rows[row] = {s.src + (u64)k * s.chunk, stream_chunk(s, k), head->scratch + row * head->slot, head->slot, 0, 0, s.arg};
}

// The result of a row's chunk: a block, or the bytes as they are.
OW_DEV bool is_row_plain(const ow_batch_item& it, u32 transform) { return !transform || it.status == OW_BATCH_GAIN; }

OW_DEV void store64(u8* p, u64 v) { stg64(p, {(u32)v, (u32)(v >> 32)}); }

// lay_out_stream lays out stream i: it gives each row its offset and length, the stream
// its tables and header, and the host the total length.
OW_DEV void lay_out_stream(const ow_stream_head* head, ow_batch_item* rows, u32 i, u32* status) {
    ow_stream s = stream_list(head)[i];
    u8* dst = (u8*)(uintptr_t)s.dst;
    bool native = s.kind == OW_STREAM_NATIVE;
    u32 n = native && !s.size ? 0 : s.rows;
    // A native payload begins 8 before a multiple of 16: header and tables are one.
    u64 front = native ? kNativeHead + 16 * (u64)n + 8 : s.kind == OW_STREAM_SIZED ? 8 : 0, off = 0;
    bool bad = front > s.stored;
    for (u32 base = 0; base < n && !bad; base += 32) {
        u32 k = base + lane_id(), bytes = 0, stored = 0;
        bool wrong = false;
        if (k < n) {
            const ow_batch_item& it = rows[s.first + k];
            bool plain = is_row_plain(it, s.arg);
            wrong = !plain && it.status;
            stored = kBlockHead + (plain ? (u32)it.src_len : (u32)it.written);
            bytes = native ? (stored + 15) & ~15u : stored;
        }
        if (ballot(wrong) && lane_id() == 0) atomic_or(status + i, OW_STREAM_DATA);
        u32 sum = bytes;
        for (u32 d = 1; d < 32; d *= 2) {
            u32 o = shfl(sum, lane_id() - d);
            if (lane_id() >= d) sum += o;
        }
        u64 at = off + sum - bytes;
        off += shfl(sum, 31);
        bad = front + off > s.stored;
        if (k < n) {
            if (native) {
                store64(dst + kNativeHead + 8 * (u64)k, at);
                store64(dst + kNativeHead + 8 * ((u64)n + k), stored);
            }
            rows[s.first + k].dst = s.dst + front + at;
            rows[s.first + k].dst_cap = bad ? 0 : stored;
        }
    }
    syncwarp();  // the rows are all written
    if (lane_id()) return;
    if (bad) {
        for (u32 k = 0; k < n; k++) rows[s.first + k].dst_cap = 0;
        atomic_or(status + i, OW_STREAM_ROOM);
        return;
    }
    ow_stream_peek_t* out = (ow_stream_peek_t*)((u8*)status + head->answers) + i;
    *out = {front + off, s.chunk, s.format, 0};
    if (s.kind == OW_STREAM_SIZED) store64(dst, s.size);
    if (!native) return;
    for (u32 k = 0; k < kNativeHead; k += 8) store64(dst + k, 0);
    store64(dst + front - 8, 0);
    stg32(dst, OW_STREAM_MAGIC);
    stg8(dst + 4, 1);
    stg8(dst + 6, s.format);
    store64(dst + 8, off);
    store64(dst + 16, s.size);
    store64(dst + 24, n);
    stg8(dst + 32, 1);
    store64(dst + 48, s.chunk);
    stg32(dst + 56, (u32)front);
}

// write_row_share writes a warp's share of a row: head, block, padding.
OW_DEV void write_row_share(const ow_stream_head* head, const ow_batch_item* rows, u32 job, u32*) {
    u32 split = head->split, row = job / split, share = job % split;
    ow_stream s = stream_list(head)[find_stream(head, row)];
    ow_batch_item it = rows[row];
    if (it.dst_cap == 0 || (s.kind == OW_STREAM_NATIVE && !s.size)) return;
    bool plain = is_row_plain(it, s.arg);
    u32 n = (u32)it.dst_cap - kBlockHead;
    copy_share(it.dst + kBlockHead, plain ? it.src : head->scratch + row * head->slot, n, share, split);
    if (share) return;
    u8* dst = (u8*)(uintptr_t)it.dst;
    if (lane_id() == 0) {
        u64 h = (u64)stream_chunk(s, row - s.first) << 32;
        if (!plain) h |= 1 | (it.arg & 255) << 8 | (it.arg & 0xffff0000);
        for (u32 i = 0; i < kBlockHead; i++) stg8(dst + i, (u32)(h >> (8 * i)) & 255);
    }
    if (s.kind == OW_STREAM_NATIVE && it.dst_cap % 16) {
        u32 pad = 16 - it.dst_cap % 16;
        if (lane_id() < pad) stg8(dst + it.dst_cap + lane_id(), 0);
    }
}

}  // namespace ow
#endif
