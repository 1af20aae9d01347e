// Fits the model of a chunk with one warp, as the Go encoder does
// (gosrc/codec/x16/fit.go and table.go). Lane k has symbol k. The same histogram gives
// the same model, bit for bit, because doubles are added in the same order and nothing is
// contracted.
#ifndef OVERWIRE_X16_FIT_CUH
#define OVERWIRE_X16_FIT_CUH

#include "warp.cuh"

namespace ow {

// log2 of 0..256, with 0 for log2(0). These are the values of `log2` in gosrc/codec/x16/fit.go,
// printed by strconv.FormatFloat(v, 'x', -1, 64). The twin tests compare the chunks of both encoders.
#ifdef __CUDACC__
__device__
#endif
static const double kLog2[257] = {
    0x0p0, 0x0p0, 0x1p0, 0x1.95c01a39fbd69p0,
    0x1p1, 0x1.2934f0979a371p1, 0x1.4ae00d1cfdeb4p1, 0x1.675767f54042dp1,
    0x1.8p1, 0x1.95c01a39fbd69p1, 0x1.a934f0979a371p1, 0x1.bacea7c065d42p1,
    0x1.cae00d1cfdeb4p1, 0x1.d9a802391e233p1, 0x1.e75767f54042dp1, 0x1.f414fdb498226p1,
    0x1p2, 0x1.0598fdbeb244cp2, 0x1.0ae00d1cfdeb4p2, 0x1.0fde0b5c8134p2,
    0x1.149a784bcd1b9p2, 0x1.191bba891f171p2, 0x1.1d6753e032ea1p2, 0x1.21820a01ac755p2,
    0x1.2570068e7ef5ap2, 0x1.2934f0979a371p2, 0x1.2cd4011c8f119p2, 0x1.305013ab7ce0ep2,
    0x1.33abb3faa0216p2, 0x1.36e9291eaa65bp2, 0x1.3a0a7eda4c113p2, 0x1.3d118d66c4d4ep2,
    0x1.4p2, 0x1.42d75a6eb1dfbp2, 0x1.4598fdbeb244cp2, 0x1.48462c466d3cfp2,
    0x1.4ae00d1cfdeb4p2, 0x1.4d67af16da765p2, 0x1.4fde0b5c8134p2, 0x1.524407ab0e074p2,
    0x1.549a784bcd1b9p2, 0x1.56e221cd9d0cep2, 0x1.591bba891f171p2, 0x1.5b47ebf73882ap2,
    0x1.5d6753e032ea1p2, 0x1.5f7a8568cb06dp2, 0x1.61820a01ac755p2, 0x1.637e623d2ba02p2,
    0x1.6570068e7ef5ap2, 0x1.675767f54042dp2, 0x1.6934f0979a371p2, 0x1.6b09044d313a6p2,
    0x1.6cd4011c8f119p2, 0x1.6e963fac9c0eap2, 0x1.705013ab7ce0ep2, 0x1.7201cc2c0005ap2,
    0x1.73abb3faa0216p2, 0x1.754e11eb0029ap2, 0x1.76e9291eaa65bp2, 0x1.787d3945c340bp2,
    0x1.7a0a7eda4c113p2, 0x1.7b9133567feaep2, 0x1.7d118d66c4d4ep2, 0x1.7e8bc1179e0cbp2,
    0x1.8p2, 0x1.816e79685c2d2p2, 0x1.82d75a6eb1dfbp2, 0x1.843ace27e8a7ep2,
    0x1.8598fdbeb244cp2, 0x1.86f210902b6afp2, 0x1.88462c466d3cfp2, 0x1.899574f13c571p2,
    0x1.8ae00d1cfdeb4p2, 0x1.8c2615e81781ep2, 0x1.8d67af16da765p2, 0x1.8ea4f726192cbp2,
    0x1.8fde0b5c8134p2, 0x1.911307dad30b7p2, 0x1.924407ab0e074p2, 0x1.937124cea4cdfp2,
    0x1.949a784bcd1b9p2, 0x1.95c01a39fbd68p2, 0x1.96e221cd9d0cep2, 0x1.9800a563161c5p2,
    0x1.991bba891f171p2, 0x1.9a33760a7f605p2, 0x1.9b47ebf73882ap2, 0x1.9c592fad295b5p2,
    0x1.9d6753e032ea1p2, 0x1.9e726aa1e754dp2, 0x1.9f7a8568cb06dp2, 0x1.a07fb5172f33p2,
    0x1.a1820a01ac755p2, 0x1.a28193f543ca8p2, 0x1.a37e623d2ba02p2, 0x1.a47883a84e4f9p2,
    0x1.a570068e7ef5ap2, 0x1.a664f8d569395p2, 0x1.a75767f54042dp2, 0x1.a84760fd30d55p2,
    0x1.a934f0979a371p2, 0x1.aa20230e1151fp2, 0x1.ab09044d313a6p2, 0x1.abef9fe83c136p2,
    0x1.acd4011c8f119p2, 0x1.adb632d4ec329p2, 0x1.ae963fac9c0eap2, 0x1.af7431f26a05cp2,
    0x1.b05013ab7ce0ep2, 0x1.b129ee960ddf1p2, 0x1.b201cc2c0005ap2, 0x1.b2d7b5a5596bfp2,
    0x1.b3abb3faa0216p2, 0x1.b47dcfe71c304p2, 0x1.b54e11eb0029ap2, 0x1.b61c824d7990dp2,
    0x1.b6e9291eaa65bp2, 0x1.b7b40e398cfcep2, 0x1.b87d3945c340bp2, 0x1.b944b1b952663p2,
    0x1.ba0a7eda4c113p2, 0x1.bacea7c065d42p2, 0x1.bb9133567feaep2, 0x1.bc52285c1c028p2,
    0x1.bd118d66c4d4ep2, 0x1.bdcf68e36752ap2, 0x1.be8bc1179e0cbp2, 0x1.bf469c22ef846p2,
    0x1.cp2, 0x1.c0b7f285b7784p2, 0x1.c16e79685c2d2p2, 0x1.c2239a3aa2668p2,
    0x1.c2d75a6eb1dfbp2, 0x1.c389bf5721557p2, 0x1.c43ace27e8a7ep2, 0x1.c4ea8bf749fc7p2,
    0x1.c598fdbeb244cp2, 0x1.c646285b918cep2, 0x1.c6f210902b6afp2, 0x1.c79cbb045fe97p2,
    0x1.c8462c466d3cfp2, 0x1.c8ee68cbaa95cp2, 0x1.c99574f13c571p2, 0x1.ca3b54fcc1fbap2,
    0x1.cae00d1cfdeb4p2, 0x1.cb83a16a77814p2, 0x1.cc2615e81781ep2, 0x1.ccc76e83bf387p2,
    0x1.cd67af16da765p2, 0x1.ce06db66eca7p2, 0x1.cea4f726192cbp2, 0x1.cf4205f3a7352p2,
    0x1.cfde0b5c8134p2, 0x1.d0790adbb0301p2, 0x1.d11307dad30b7p2, 0x1.d1ac05b291f07p2,
    0x1.d24407ab0e074p2, 0x1.d2db10fc4d9abp2, 0x1.d37124cea4cdfp2, 0x1.d406463b1b044p2,
    0x1.d49a784bcd1b9p2, 0x1.d52dbdfc4c96bp2, 0x1.d5c01a39fbd68p2, 0x1.d6518fe4677bap2,
    0x1.d6e221cd9d0cep2, 0x1.d771d2ba7efb4p2, 0x1.d800a563161c5p2, 0x1.d88e9c72e0b22p2,
    0x1.d91bba891f171p2, 0x1.d9a802391e233p2, 0x1.da33760a7f605p2, 0x1.dabe18797f1f5p2,
    0x1.db47ebf73882ap2, 0x1.dbd0f2e9e7903p2, 0x1.dc592fad295b5p2, 0x1.dce0a4923a588p2,
    0x1.dd6753e032ea1p2, 0x1.dded3fd442365p2, 0x1.de726aa1e754dp2, 0x1.def6d67328e22p2,
    0x1.df7a8568cb06dp2, 0x1.dffd799a83ffap2, 0x1.e07fb5172f33p2, 0x1.e10139e4fee08p2,
    0x1.e1820a01ac755p2, 0x1.e2022762a791dp2, 0x1.e28193f543ca8p2, 0x1.e300519ee52edp2,
    0x1.e37e623d2ba02p2, 0x1.e3fbc7a61d025p2, 0x1.e47883a84e4f9p2, 0x1.e4f4980b0b97fp2,
    0x1.e570068e7ef5ap2, 0x1.e5ead0ebd67e5p2, 0x1.e664f8d569395p2, 0x1.e6de7ff6db22cp2,
    0x1.e75767f54042dp2, 0x1.e7cfb26f3ee03p2, 0x1.e84760fd30d55p2, 0x1.e8be7531440e7p2,
    0x1.e934f0979a371p2, 0x1.e9aad4b6679d9p2, 0x1.ea20230e1151fp2, 0x1.ea94dd194a872p2,
    0x1.eb09044d313a6p2, 0x1.eb7c9a196a287p2, 0x1.ebef9fe83c136p2, 0x1.ec62171eaa609p2,
    0x1.ecd4011c8f119p2, 0x1.ed455f3cb41e1p2, 0x1.edb632d4ec329p2, 0x1.ee267d362ad9p2,
    0x1.ee963fac9c0eap2, 0x1.ef057b7fbb4cbp2, 0x1.ef7431f26a05cp2, 0x1.efe26443059e3p2,
    0x1.f05013ab7ce0ep2, 0x1.f0bd416164f65p2, 0x1.f129ee960ddf1p2, 0x1.f1961c7696778p2,
    0x1.f201cc2c0005ap2, 0x1.f26cfedb41566p2, 0x1.f2d7b5a5596bfp2, 0x1.f341f1a761c0ap2,
    0x1.f3abb3faa0216p2, 0x1.f414fdb498226p2, 0x1.f47dcfe71c304p2, 0x1.f4e62ba05e419p2,
    0x1.f54e11eb0029ap2, 0x1.f5b583ce23906p2, 0x1.f61c824d7990dp2, 0x1.f6830e6952011p2,
    0x1.f6e9291eaa65bp2, 0x1.f74ed3673c92cp2, 0x1.f7b40e398cfcep2, 0x1.f818da88f8bbap2,
    0x1.f87d3945c340bp2, 0x1.f8e12b5d23c39p2, 0x1.f944b1b952663p2, 0x1.f9a7cd4195121p2,
    0x1.fa0a7eda4c113p2, 0x1.fa6cc764fe63bp2, 0x1.facea7c065d42p2, 0x1.fb3020c87acc3p2,
    0x1.fb9133567feaep2, 0x1.fbf1e0410d5e6p2, 0x1.fc52285c1c028p2, 0x1.fcb20c791045ap2,
    0x1.fd118d66c4d4ep2, 0x1.fd70abf19511fp2, 0x1.fdcf68e36752ap2, 0x1.fe2dc503b6ec6p2,
    0x1.fe8bc1179e0cbp2, 0x1.fee95de1df5f6p2, 0x1.ff469c22ef846p2, 0x1.ffa37c98fe55fp2,
    0x1p3};

constexpr u32 kNone = ~0u;

// An X16Model is the model of a chunk. Lane k has value and freq of symbol k. The other
// fields are the same in all lanes.
struct X16Model {
    u32 value, freq;  // of this lane's symbol; 0 in lanes above 15
    u32 escape;       // the symbol for all values without a symbol, or kNone
    u32 one;          // the only symbol, or kNone
    double bits;      // size of the coded symbols and escapes
};

OW_DEV u32 sum16(u32 v) {  // sums over lanes 0..15, and separately over 16..31
    OW_UNROLL(1)
    for (u32 d = 8; d; d /= 2) v += shfl(v, lane_id() ^ d);
    return v;
}

// An X16Pick has the symbol that gains most from one more slot, and the symbol that loses least
// by giving up a slot.
struct X16Pick {
    u32 up, down;  // symbols, or kNone
    double gain, cost;
};

// x16_pick finds these symbols. `count` and `slots` are those of symbol lane_id() % 16. Lanes
// below 16 evaluate one more slot, the other lanes one slot less.
OW_COLD X16Pick x16_pick(double count, u32 slots) {
    bool upper = lane_id() < 16, can = upper ? count > 0 && slots < 255 : slots > 1;
    double none = upper ? -1.0 : -1e300, change = none;
    if (can) change = upper ? dmul(count, dadd(kLog2[slots + 1], -kLog2[slots])) : -dmul(count, dadd(kLog2[slots], -kLog2[slots - 1]));
    double best = change;
    OW_UNROLL(1)
    for (u32 d = 8; d; d /= 2) {
        double o = shfl64f(best, lane_id() ^ d);
        if (o > best) best = o;
    }
    u32 at = ballot(can && change == best);
    X16Pick pick;
    pick.up = at & 0xffff ? lowest_bit(at & 0xffff) : kNone;
    pick.down = at >> 16 ? lowest_bit(at >> 16) : kNone;
    pick.gain = shfl64f(best, 0);
    pick.cost = -shfl64f(best, 16);
    return pick;
}

// x16_freq divides 256 slots among counts that sum to n, so that the coded size is
// minimal. It returns the slots of this lane's symbol and sets `bits` to the size.
OW_COLD u32 x16_freq(u32 count, u32 n, double& bits) {
    u32 symbol = lane_id() & 15;
    count = shfl(count, symbol);  // lanes k and k + 16 have the same count
    double weight = (double)count;
    u32 slots = 0;
    if (count) {
        u32 share = (u32)(((u64)count * 512 + n) / (2 * (u64)n));
        slots = share < 1 ? 1 : umin(share, 255);
    }
    for (u32 sum = sum16(slots); sum != 256;) {
        X16Pick pick = x16_pick(weight, slots);
        if (sum < 256) {
            if (pick.up == kNone) break;  // impossible: at least two counts are not 0
            slots += symbol == pick.up;
            sum++;
        } else {
            if (pick.down == kNone) break;
            slots -= symbol == pick.down;
            sum--;
        }
    }
    for (;;) {
        X16Pick pick = x16_pick(weight, slots);
        if (pick.up == kNone || pick.down == kNone || pick.up == pick.down || pick.gain <= pick.cost) break;
        slots += symbol == pick.up;
        slots -= symbol == pick.down;
    }
    double part = dmul(weight, dadd(8, -kLog2[slots]));
    bits = 0;
    OW_UNROLL(1)
    for (u32 i = 0; i < 16; i++) bits = dadd(bits, shfl64f(part, i));
    return lane_id() < 16 ? slots : 0;
}

// x16_fit finds the cheapest model for the histogram at `bins` (256 counts in
// shared memory, sum n > 0).
OW_COLD X16Model x16_fit(u32 bins, u32 n, bool identity) {
    X16Model best = {0, 0, kNone, kNone, 0};
    if (identity) {
        u32 count = lane_id() < 16 ? lds32(bins + 4 * lane_id()) : 0, all = ballot(count == n);
        best.value = lane_id() < 16 ? lane_id() : 0;
        if (all) {
            best.one = lowest_bit(all);
            return best;
        }
        best.freq = x16_freq(count, n, best.bits);
        return best;
    }
    // Each lane has the counts of 8 values. The loop selects the 16 most frequent, in order.
    u32 histogram[8], kinds = 0;
    for (u32 i = 0; i < 8; i++) {
        histogram[i] = lds32(bins + 32 * lane_id() + 4 * i);
        kinds += popc(ballot(histogram[i] > 0));
    }
    u32 value = 0, count = 0, top = umin(kinds, 16);
    for (u32 rank = 0; rank < top; rank++) {
        u32 most = 0, mine = 0;
        for (u32 i = 0; i < 8; i++) {
            if (histogram[i] > most) most = histogram[i], mine = i;
        }
        u32 all = most;
        OW_UNROLL(1)
        for (u32 d = 16; d; d /= 2) {
            u32 o = shfl(all, lane_id() ^ d);
            if (o > all) all = o;
        }
        u32 who = lowest_bit(ballot(most == all)), which = shfl(mine, who);
        for (u32 i = 0; i < 8; i++) {
            if (lane_id() == who && i == which) histogram[i] = 0;
        }
        if (lane_id() == rank) value = 8 * who + which, count = all;
    }
    if (kinds == 1) {
        best.value = value;
        best.one = 0;
        return best;
    }
    best.bits = 1e300;
    if (kinds <= 16) {
        best.value = value;
        best.freq = x16_freq(count, n, best.bits);
    }
    u32 listed_values = umin(15, kinds - 1);
    u32 escaped = n - shfl(sum16(lane_id() < listed_values ? count : 0), 0);
    for (; listed_values >= 1; listed_values--) {
        double listed = dmul((double)escaped, 24);
        if (listed >= best.bits) break;  // fewer listed values only add escapes
        double bits;
        u32 f = x16_freq(lane_id() < listed_values ? count : lane_id() == listed_values ? escaped : 0, n, bits);
        bits = dadd(bits, listed);
        if (bits < best.bits) {
            best.bits = bits;
            best.freq = f;
            best.value = lane_id() < listed_values ? value : 0;
            best.escape = listed_values;
        }
        escaped += shfl(count, listed_values - 1);
    }
    return best;
}

// x16_buckets distributes frequencies over 16 buckets of two symbols. Lane b gets the divider
// and the alias of bucket b.
OW_COLD void x16_buckets(u32 freq, u32& divider, u32& alias) {
    u32 left = freq;
    bool open = lane_id() < 16;
    divider = 16;
    alias = lane_id() & 15;
    OW_UNROLL(1)
    for (u32 i = 0; i < 16; i++) {
        u32 low = ballot(open && left < 16), high = ballot(open && left > 16);
        if (!low) break;  // all open buckets have exactly 16
        u32 bucket = lowest_bit(low), giver = high ? lowest_bit(high) : bucket, gives = 16 - shfl(left, bucket);
        if (lane_id() == bucket) {
            divider = left;
            alias = giver;
            open = false;
        }
        if (lane_id() == giver) left -= gives;
    }
}

}  // namespace ow
#endif
