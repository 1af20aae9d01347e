// Computes the block sums of XXH3-128 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md): what
// the stripes of each block of 1 KiB add to the eight accumulators. The sums do not depend on
// other blocks. The host adds them up and scrambles the accumulators after each block
// (gosrc/codec/blocksum), because that step is sequential.
#ifndef OVERWIRE_HASH_CUH
#define OVERWIRE_HASH_CUH

#include "abi_batch.h"
#include "warp.cuh"

namespace ow {

constexpr u32 kHashBlock = 1024, kHashStripe = 64;

// The specification's default secret: 192 bytes, as little-endian words of 8 bytes.
OW_TABLE u64 kHashSecret[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82,
    0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5,
    0x49daf0b751dd0d17, 0x9e68d429265516d3, 0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};

// hash_share computes a warp's share of an item's sums, eight lanes per block, and copies its
// share of the tail.
OW_DEV void hash_share(const ow_batch_item* item, u32 warp_id, u32 warps) {
    const ow_batch_item it = *item;
    const u8* src = (const u8*)(uintptr_t)it.src;
    u32 blocks = (u32)(it.src_len / kHashBlock), accumulator = lane_id() % 8;
    u64* sums = (u64*)(uintptr_t)it.dst;
    OW_UNROLL(1)
    for (u32 first = 4 * warp_id; first < blocks; first += 4 * warps) {
        u32 block = first + lane_id() / 8;
        u64 words = 0, sum = 0;
        if (block < blocks) {
            const u8* block_start = src + (u64)block * kHashBlock + 8 * accumulator;
            OW_UNROLL(16)
            for (u32 stripe = 0; stripe < kHashBlock / kHashStripe; stripe++) {
                u32x2 v = ldg64(block_start + kHashStripe * stripe);
                u64 w = (u64)v.y << 32 | v.x, x = w ^ kHashSecret[stripe + accumulator];
                words += w;
                sum += (x & 0xffffffff) * (x >> 32);
            }
        }
        sum += shfl64(words, lane_id() ^ 1);
        if (block < blocks) sums[8 * (u64)block + accumulator] = sum;
    }
    u8* tail = (u8*)(sums + 8 * (u64)blocks);
    const u8* from = src + it.src_len - it.arg;
    OW_UNROLL(1)
    for (u32 i = 32 * warp_id + lane_id(); i < it.arg; i += 32 * warps) tail[i] = ldg8(from + i);
}

}  // namespace ow

#endif
