// Computes tensor digests on the device. gosrc/codec/digest defines them.
//
// A warp sums a range of tiles. The range may cover several tensors and end inside one, so
// the sums stay in registers until the next tensor begins. Words can be summed in any order,
// so the digest does not depend on the grid.
#ifndef OVERWIRE_DIGEST_CUH
#define OVERWIRE_DIGEST_CUH

#include "abi_digest.h"
#include "warp.cuh"

namespace ow {

constexpr u64 kDigestStep = 0x9e3779b97f4a7c15, kDigestM1 = 0xa54ff53a5f1d36f1, kDigestM2 = 0xbb67ae8584caa73b;
constexpr u32 kTileWords = OW_DIGEST_TILE / 8;

struct DigestSums { u64 a, b; };
struct alignas(16) KeyPair { u64 v, w; };

// add_word adds a word to the sums. The key of word i is (i + 1) * kDigestStep.
OW_DEV void add_word(DigestSums& sums, u64 word, u64 key) {
    u64 x = word + key;
    x = (x ^ x >> 32) * kDigestM1;
    x = (x ^ x >> 32) * kDigestM2;
    u64 high = x >> 32;
    x ^= high;
    sums.a += x;
    sums.b += x * (high | 1);
}

OW_DEV u64 ldg_item(const u8* p, u32 item) {
    switch (item) {
        case 1: return ldg8(p);
        case 2: return ldg16(p);
        case 4: return ldg32(p);
    }
    u32x2 v = ldg64(p);
    return (u64)v.y << 32 | v.x;
}

// element_address returns the address of an element, and sets `row` to the number of elements
// from it to the end of the innermost dimension.
OW_DEV const u8* element_address(const ow_digest_job& job, const ow_digest_dim* dims, u64 element, u64& row) {
    u64 at = job.src;
    OW_UNROLL(1)
    for (u32 i = job.rank; i-- > 0;) {
        ow_digest_dim dim = dims[i];
        u64 q = element / dim.size, coordinate = element - q * dim.size;
        if (i + 1u == job.rank) row = dim.size - coordinate;
        at += coordinate * (u64)dim.stride;
        element = q;
    }
    return (const u8*)(uintptr_t)at;
}

// load_tensor_word returns word number `word` of a tensor. Bytes after the tensor's end are 0.
OW_DEV u64 load_tensor_word(const ow_digest_job& job, const ow_digest_dim* dims, u64 word) {
    u64 left = job.bytes - 8 * word, v = 0;
    if (job.rank == 0) {
        const u8* address = (const u8*)(uintptr_t)job.src + 8 * word;
        if (left >= 8) return ldg_item(address, 8);
        OW_UNROLL(1)
        for (u32 k = 0; k < (u32)left; k++) v |= (u64)ldg8(address + k) << (8 * k);
        return v;
    }
    u32 item = job.item, n = (left < 8 ? (u32)left : 8) / item;
    u64 element = word * (8 / item), row, stride = (u64)dims[job.rank - 1].stride;
    const u8* address = element_address(job, dims, element, row);
    OW_UNROLL(1)
    for (u32 k = 0; k < n; k++) {
        v |= ldg_item(address, item) << (8 * item * k);
        if (--row) address += stride;
        else if (k + 1 < n) address = element_address(job, dims, element + k + 1, row);
    }
    return v;
}

// load_tile returns this lane's part of a whole contiguous tile: pairs of words.
OW_DEV void load_tile(u32x4* v, const ow_digest_job& job, u64 first) {
    const u8* p = (const u8*)(uintptr_t)job.src + 8 * first + 16 * lane_id();
    OW_UNROLL(8)
    for (u32 k = 0; k < 8; k++) v[k] = ldg128(p + 512 * k);
}

// is_whole_tile reports whether load_tile can read the tile that begins at word `first`.
OW_DEV bool is_whole_tile(const ow_digest_job& job, u64 first) {
    return job.rank == 0 && job.item == 16 && job.bytes - 8 * first >= OW_DIGEST_TILE;
}

// add_tile adds this lane's words of one tile to the sums.
OW_DEV void add_tile(DigestSums& sums, const ow_digest_job& job, const ow_digest_dim* dims, u64 tile) {
    u64 first = tile * kTileWords;
    if (is_whole_tile(job, first)) {
        u32x4 v[8];
        load_tile(v, job, first);
        u64 key = (first + 2 * lane_id() + 1) * kDigestStep;
        OW_UNROLL(8)
        for (u32 k = 0; k < 8; k++) {
            add_word(sums, (u64)v[k].y << 32 | v[k].x, key);
            add_word(sums, (u64)v[k].w << 32 | v[k].z, key + kDigestStep);
            key += 64 * kDigestStep;
        }
        return;
    }
    u64 words = (job.bytes + 7) / 8 - first;
    OW_UNROLL(1)
    for (u32 k = lane_id(); k < kTileWords && k < words; k += 32) {
        add_word(sums, load_tensor_word(job, dims, first + k), (first + k + 1) * kDigestStep);
    }
}

// add_product adds the halves of the product of two words, each plus a secret word, to the sums.
OW_DEV void add_product(DigestSums& sums, u64 v, u64 w, KeyPair secret) {
    v += secret.v;
    w += secret.w;
    sums.a += v * w;
    sums.b += mulhi64(v, w);
}

OW_DEV u64 mix_word(u64 x) {
    x = (x ^ x >> 32) * kDigestM1;
    x = (x ^ x >> 32) * kDigestM2;
    return x ^ x >> 32;
}

// add_keyed_tile adds this lane's row of one tile to the sums of a keyed digest.
OW_DEV void add_keyed_tile(DigestSums& sums, const ow_digest_job& job, const ow_digest_dim* dims, u64 tile,
                           const KeyPair* key) {
    u64 first = tile * kTileWords, words = (job.bytes + 7) / 8;
    DigestSums row = {0, 0};
    if (is_whole_tile(job, first)) {
        u32x4 v[8];
        load_tile(v, job, first);
        OW_UNROLL(8)
        for (u32 k = 0; k < 8; k++) {
            add_product(row, (u64)v[k].y << 32 | v[k].x, (u64)v[k].w << 32 | v[k].z, key[k]);
        }
    } else {
        OW_UNROLL(1)
        for (u32 k = 0; k < 8; k++) {
            u64 at = first + 64 * k + 2 * lane_id();
            u64 v = at < words ? load_tensor_word(job, dims, at) : 0;
            u64 w = at + 1 < words ? load_tensor_word(job, dims, at + 1) : 0;
            add_product(row, v, w, key[k]);
        }
    }
    u64 number = (32 * tile + lane_id()) * kDigestStep;
    KeyPair last = key[8];
    add_product(sums, row.a, row.b, {mix_word(last.v + number), mix_word(last.w + number)});
}

// flush_sums adds the sums of all lanes to the sums of a tensor.
OW_DEV void flush_sums(u64* sums, DigestSums added) {
    OW_UNROLL(5)
    for (u32 d = 16; d > 0; d /= 2) {
        added.a += shfl64(added.a, lane_id() ^ d);
        added.b += shfl64(added.b, lane_id() ^ d);
    }
    if (lane_id() == 0) {
        atomic_add64(sums, added.a);
        atomic_add64(sums + 1, added.b);
    }
}

// digest_share does the work of warp number `warp_id` of `warps`. A keyed digest's key is before the sums.
template <bool KEYED>
OW_DEV void digest_share(const ow_digest_job* jobs, u32 n, u64 tiles, const ow_digest_dim* dims, u64* sums, u32 warp_id, u32 warps) {
    u64 at = tiles * warp_id / warps, end = tiles * (warp_id + 1) / warps;
    if (at >= end) return;
    u32 j = 0;
    for (u32 len = n; len > 1;) {  // find the last job that begins at or before `at`
        u32 half = len / 2;
        if (jobs[j + half].first <= at) j += half;
        len -= half;
    }
    for (; at < end; j++) {
        ow_digest_job job = jobs[j];
        u64 stop = job.first + (job.bytes + OW_DIGEST_TILE - 1) / OW_DIGEST_TILE;
        if (stop > end) stop = end;
        DigestSums added = {0, 0};
        for (; at < stop; at++) {
            if (KEYED) add_keyed_tile(added, job, dims + job.dims, at - job.first, (const KeyPair*)(sums - OW_DIGEST_KEY));
            else add_tile(added, job, dims + job.dims, at - job.first);
        }
        flush_sums(sums + 2 * j, added);
    }
}

}  // namespace ow
#endif
