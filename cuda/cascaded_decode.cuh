// Decodes Cascaded blocks, one warp per block. gosrc/nvcomp/cascaded describes the
// layout: a block is a head and chunks of 4096 content bytes. A chunk has arrays of run
// lengths, the first value of each layer of differences, and an array of values. Arrays
// may be bit-packed.
//
// Each layer is decoded from one of two buffers in shared memory to the other.
// Differences are decoded by prefix sums. Runs are expanded by prefix sums of their
// lengths and a search for each element. The decoder accepts exactly the blocks that the
// Go decoder accepts.
#ifndef OVERWIRE_CASCADED_DECODE_CUH
#define OVERWIRE_CASCADED_DECODE_CUH

#include "lz.cuh"

namespace ow {

constexpr u32 kCascadedChunk = 4096, kCascadedShared = OW_BATCH_WARPS * 2 * kCascadedChunk;

// The register type of an element of S bytes.
template <u32 S> struct Element {
    typedef u32 V;
};
template <> struct Element<8> {
    typedef u64 V;
};

template <u32 S> OW_DEV typename Element<S>::V load_element(u32 a) {
    if (S == 1) return lds8(a);
    if (S == 2) return lds16(a);
    if (S == 4) return lds32(a);
    u32x2 v = lds64(a);
    return (typename Element<S>::V)((u64)v.y << 32 | v.x);
}
template <u32 S> OW_DEV void store_element(u32 a, typename Element<S>::V v) {
    if (S == 1) sts8(a, (u32)v);
    if (S == 2) sts16(a, (u32)v);
    if (S == 4) sts32(a, (u32)v);
    if (S == 8) sts64(a, {(u32)v, (u32)((u64)v >> 32)});
}
OW_DEV u32 load_unaligned32(const u8* p) {
    if (((uintptr_t)p & 3) == 0) return ldg32(p);
    return ldg8(p) | ldg8(p + 1) << 8 | ldg8(p + 2) << 16 | ldg8(p + 3) << 24;
}
template <u32 S> OW_DEV typename Element<S>::V load_unaligned_element(const u8* p) {
    typedef typename Element<S>::V V;
    if (S == 1) return (V)ldg8(p);
    if (S == 2) return (V)(ldg8(p) | ldg8(p + 1) << 8);
    if (S == 4) return (V)load_unaligned32(p);
    return (V)((u64)load_unaligned32(p + 4) << 32 | load_unaligned32(p));
}
OW_DEV u32 shuffle_element(u32 v, u32 from) { return shfl(v, from); }
OW_DEV u64 shuffle_element(u64 v, u32 from) { return (u64)shfl((u32)(v >> 32), from) << 32 | shfl((u32)v, from); }

// A CascadedArray is a stored array of n values. If it is packed, each value is stored in
// `width` bits, as its difference from `least`.
struct CascadedArray {
    const u8* p;
    u32 n, width;
    u64 least;
    bool packed;
};

// open_array parses an array of at most `most` elements. It returns false if the array is
// invalid.
template <u32 S> OW_DEV bool open_array(CascadedArray& array, const u8* p, u32 bytes, bool packed, u32 most) {
    constexpr u32 word = S > 4 ? S : 4, head = (word + 4 + word - 1) / word * word;
    array.packed = packed;
    array.p = p;
    if (!packed) {
        array.n = bytes / S;
        return bytes % S == 0 && array.n <= most;
    }
    if (bytes < head) return false;
    array.least = load_unaligned_element<S>(p);
    u32 w = load_unaligned32(p + word);
    array.width = w >> 16;
    array.n = w & 0xffff;
    array.p = p + head;
    return array.width <= 8 * S && array.n <= most && (array.n * array.width + 31) / 32 * 4 == bytes - head;
}

template <u32 S> OW_DEV typename Element<S>::V load_array_element(const CascadedArray& array, u32 i) {
    typedef typename Element<S>::V V;
    if (!array.packed) return load_unaligned_element<S>(array.p + S * i);
    u32 at = i * array.width, skip = at & 31, upto = skip + array.width;
    if (array.width == 0) return (V)array.least;
    const u8* p = array.p + 4 * (at >> 5);
    u64 v = load_unaligned32(p) >> skip;
    if (upto > 32) v |= (u64)load_unaligned32(p + 4) << (32 - skip);
    if (S == 8 && upto > 64) v |= (u64)load_unaligned32(p + 8) << (64 - skip);
    if (array.width < 64) v &= ((u64)1 << array.width) - 1;
    return (V)(v + array.least);
}

template <class V> OW_DEV V prefix_sum(V v) {  // inclusive, over the lanes
    for (u32 d = 1; d < 32; d *= 2) {
        V o = shuffle_element(v, lane_id() - d);
        if (lane_id() >= d) v += o;
    }
    return v;
}

// sum_differences computes n + 1 values from the first value and n differences.
template <u32 S> OW_DEV void sum_differences(u32 to, u32 from, u32 n, typename Element<S>::V first) {
    typedef typename Element<S>::V V;
    if (lane_id() == 0) store_element<S>(to, first);
    OW_UNROLL(1)
    for (u32 i = 0; i < n; i += 32) {
        V v = prefix_sum(i + lane_id() < n ? load_element<S>(from + S * (i + lane_id())) : (V)0);
        if (i + lane_id() < n) store_element<S>(to + S * (i + lane_id() + 1), v + first);
        first += shuffle_element(v, 31);
    }
    syncwarp();
}

// expand_runs repeats each of n values by its run length. It returns the number of
// elements written, or kMany if there would be more than `most`.
constexpr u32 kMany = ~0u;

template <u32 S> OW_DEV u32 expand_runs(u32 to, u32 from, u32 n, const CascadedArray& runs, u32 most) {
    typedef typename Element<S>::V V;
    u32 made = 0;
    OW_UNROLL(1)
    for (u32 i = 0; i < n; i += 32) {
        u32 times = 0;
        V v = 0;
        if (i + lane_id() < n) {
            times = umin(load_array_element<2>(runs, i + lane_id()), most + 1);
            v = load_element<S>(from + S * (i + lane_id()));
        }
        u32 upto = prefix_sum(times), total = shfl(upto, 31);
        if (total > most - made) return kMany;
        OW_UNROLL(1)
        for (u32 k = 0; k < total; k += 32) {
            u32 r = 0;  // the run that contains element k + lane
            for (u32 s = 16; s; s /= 2) {
                if (shfl(upto, r + s - 1) <= k + lane_id()) r += s;
            }
            V x = shuffle_element(v, r);
            if (k + lane_id() < total) store_element<S>(to + S * (made + k + lane_id()), x);
        }
        made += total;
    }
    syncwarp();
    return made;
}

// A CascadedChunk describes the arrays of a chunk. In lane i, place and bytes are the
// offset and size of stage i's array: run lengths if i is even, the first value of a layer
// of differences if i is odd. In lane 31 they are those of the array of values. Bit i of
// `set` tells whether the chunk has stage i.
struct CascadedChunk {
    u32 used, set, place, bytes;
    bool packed;
};

// open_cascaded_chunk finds the arrays of the chunk at src, which has at most `left` bytes.
// It returns false if the chunk is invalid.
template <u32 S> OW_DEV bool open_cascaded_chunk(CascadedChunk& chunk, const u8* src, u32 left, u32 head) {
    constexpr u32 word = S > 4 ? S : 4;
    u32 rles = head & 255, deltas = head >> 8 & 255;
    chunk.packed = head >> 16 & 255;
    chunk.set = (0x1555u & ((1u << 2 * rles) - 1)) | (0x2aaau & ((1u << 2 * deltas) - 1));
    u32 firsts = (4 + 4 * (rles + 1) + S - 1) / S * S, at = firsts + (S * deltas + 3) / 4 * 4;
    if (left < at) return false;
    chunk.used = load_unaligned32(src);
    if (chunk.used < at || chunk.used > left || chunk.used % word) return false;
    chunk.place = firsts + S * (lane_id() / 2);
    chunk.bytes = 0;
    for (u32 i = 0; i <= rles; i++) {  // each array follows the previous one
        if (i == rles) at = (at + word - 1) / word * word;
        u32 n = load_unaligned32(src + 4 * (i + 1));
        if (at > chunk.used || n > chunk.used - at) return false;
        if (lane_id() == (i == rles ? 31 : 2 * i)) chunk.place = at, chunk.bytes = n;
        at = (at + n + 3) / 4 * 4;
    }
    return true;
}

// cascaded_chunk decodes the chunk at src, which has at most `left` bytes, to dst. It sets
// `used` to the bytes read and `made` to the bytes written. It returns false if the chunk is
// invalid.
template <u32 S>
OW_COLD bool cascaded_chunk(const u8* src, u32 left, u8* dst, u32 room, u32 shared, u32 head, u32& used, u32& made) {
    constexpr u32 most = kCascadedChunk / S;
    CascadedChunk chunk;
    if (!open_cascaded_chunk<S>(chunk, src, left, head)) return false;
    used = chunk.used;
    CascadedArray array;
    if (!open_array<S>(array, src + shfl(chunk.place, 31), shfl(chunk.bytes, 31), chunk.packed, most)) return false;
    u32 in = shared, out = shared + kCascadedChunk, n = array.n;
    syncwarp();  // all lanes have finished reading the buffers
    OW_UNROLL(1)
    for (u32 i = lane_id(); i < n; i += 32) store_element<S>(in + S * i, load_array_element<S>(array, i));
    syncwarp();
    OW_UNROLL(1)
    for (u32 i = 14; i-- > 0;) {
        if (!(chunk.set >> i & 1)) continue;
        u32 p = shfl(chunk.place, i), b = shfl(chunk.bytes, i);
        if (i % 2 == 0) {
            if (!open_array<2>(array, src + p, b, chunk.packed, most) || array.n != n) return false;
            n = expand_runs<S>(out, in, n, array, most);
            if (n == kMany) return false;
        } else {
            if (n >= most) return false;
            sum_differences<S>(out, in, n, load_unaligned_element<S>(src + p));
            n++;
        }
        u32 t = in;
        in = out, out = t;
    }
    made = n * S;
    if (made == 0 || made > room) return false;
    u32 words = ((uintptr_t)dst & 3) == 0 ? made / 4 : 0;
    OW_UNROLL(1)
    for (u32 i = lane_id(); i < words; i += 32) store_in_order32(dst + 4 * i, lds32(in + 4 * i));
    OW_UNROLL(1)
    for (u32 i = 4 * words + lane_id(); i < made; i += 32) store_in_order8(dst + i, lds8(in + i));
    return true;
}

// decode_cascaded_block decodes a block and sets `out` to the bytes written. Returns 0 or a
// status.
OW_DEV u32 decode_cascaded_block(const u8* src, u32 n, u8* dst, u32 cap, u32 shared, u32& out) {
    out = 0;
    if (n < 8) return OW_BATCH_INPUT;
    u32 head = load_unaligned32(src), size = load_unaligned32(src + 4), type = head >> 24;
    if ((head & 255) > 7 || (head >> 8 & 255) > 7 || (head >> 16 & 255) > 1 || type > 7) return OW_BATCH_INPUT;
    u32 element = 1u << type / 2;
    if (size % element || size > (u64)(n - 8) * (kCascadedChunk / 8)) return OW_BATCH_INPUT;
    if (size > cap) return OW_BATCH_ROOM;
    u32 left = n - 8;
    src += 8;
    if ((head & 0xffffff) == 0) {
        if (left < size || left > (size + 3) / 4 * 4) return OW_BATCH_INPUT;
        if (size) copy_disjoint<false>(dst, src, size, src, src + left);
        out = size;
        return 0;
    }
    OW_UNROLL(1)
    while (left) {
        u32 used = 0, made = 0, room = size - out;
        bool good = element == 1   ? cascaded_chunk<1>(src, left, dst + out, room, shared, head, used, made)
                    : element == 2 ? cascaded_chunk<2>(src, left, dst + out, room, shared, head, used, made)
                    : element == 4 ? cascaded_chunk<4>(src, left, dst + out, room, shared, head, used, made)
                                   : cascaded_chunk<8>(src, left, dst + out, room, shared, head, used, made);
        if (!good) return OW_BATCH_INPUT;
        src += used;
        left -= used;
        out += made;
    }
    return out == size ? 0 : OW_BATCH_INPUT;
}

OW_DEV void decode_cascaded_item(ow_batch_item* items, u32 job, u32 base, u32 warp_id) {
    u32 shared = base + warp_id * (2 * kCascadedChunk);
    ow_batch_item it = items[job];
    u32 status = OW_BATCH_ARG, out = 0;
    if (it.src_len >> 31 == 0 && it.dst_cap >> 31 == 0) {
        status = decode_cascaded_block((const u8*)(uintptr_t)it.src, (u32)it.src_len, (u8*)(uintptr_t)it.dst, (u32)it.dst_cap, shared, out);
    }
    write_result(items + job, status, out);
}

}  // namespace ow
#endif
