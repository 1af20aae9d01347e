// Warp operations for kernel bodies, implemented on the device and on the host.
//
// Kernel bodies use only this file. On the device, most functions are one instruction.
// On the host (warp_host.h), any C++17 compiler works without CUDA: a warp is 32 fibers
// on one thread, every warp operation is a rendezvous, shared memory is a bounds-checked
// array, and asynchronous copies are deferred until the body waits for them. The same
// source is thus both the GPU kernel and its host twin.
//
// Rules for bodies:
//   - All lanes execute the same sequence of warp operations. The host aborts otherwise.
//   - Shared memory is accessed with lds and sts, by 32-bit byte addresses.
//   - Block-wide operations are not allowed. Work that several warps share is divided into
//     phases with a barrier between them. On the host, the warps run each phase one after
//     another, and shared memory keeps its contents (run_phase).
#ifndef OVERWIRE_WARP_CUH
#define OVERWIRE_WARP_CUH

#include <stdint.h>
#include <string.h>

namespace ow {
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
struct alignas(8) u32x2 { u32 x, y; };
struct alignas(16) u32x4 { u32 x, y, z, w; };
}  // namespace ow

#ifdef __CUDACC__

#define OW_DEV static __device__ __forceinline__
#define OW_METHOD __device__ __forceinline__
#define OW_TABLE static __device__ const
#define OW_COLD static __device__ __noinline__  // not inlined: called rarely
#define OW_PRAGMA(x) _Pragma(#x)
#define OW_UNROLL(n) OW_PRAGMA(unroll n)  // for nvcc only

namespace ow {

OW_DEV u32 lane_id() { return threadIdx.x & 31; }
// The shuffle tells the compiler that the result is uniform: branches on it do not diverge.
OW_DEV u32 warp_of_block() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }
OW_DEV u32 lanes_below() {
    u32 m;
    asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(m));
    return m;
}
// keep_in_register makes the compiler keep a value in a register instead of recomputing it.
OW_DEV u32 keep_in_register(u32 v) {
    asm volatile("" : "+r"(v));
    return v;
}
OW_DEV u32 ballot(bool p) { return __ballot_sync(0xffffffffu, p); }
OW_DEV u32 shfl(u32 v, u32 from) { return __shfl_sync(0xffffffffu, v, (int)from); }
// The bitwise OR of the values of all lanes.
OW_DEV u32 or_of_lanes(u32 v) { return __reduce_or_sync(0xffffffffu, v); }
// The inclusive prefix sum over the lanes.
OW_DEV u32 sum_of_lanes_to(u32 v) {
    for (u32 d = 1; d < 32; d *= 2) {
        asm volatile(
            "{\n.reg .pred p;\n.reg .u32 r;\nshfl.sync.up.b32 r|p, %0, %1, 0, -1;\n@p add.u32 %0, %0, r;\n}" : "+r"(v) : "r"(d));
    }
    return v;
}
OW_DEV void syncwarp() { __syncwarp(); }
// 1 << n, or 0 if n is 32 or more.
OW_DEV u32 bit(u32 n) {
    u32 r;
    asm("shl.b32 %0, 1, %1;" : "=r"(r) : "r"(n));
    return r;
}
OW_DEV u32 highest_bit(u32 v) { return 31 - (u32)__clz((int)v); }  // index of the highest set bit; v is not 0
OW_DEV u32 popc(u32 v) { return (u32)__popc((int)v); }
OW_DEV u32 lowest_bit(u32 v) { return (u32)__ffs((int)v) - 1; }  // index of the lowest set bit; v is not 0
// Double operations that nvcc does not contract to FMA, so results equal the Go encoder's bit for bit.
OW_DEV double dadd(double a, double b) { return __dadd_rn(a, b); }
OW_DEV double dmul(double a, double b) { return __dmul_rn(a, b); }
OW_DEV double shfl64f(double v, u32 from) { return __shfl_sync(0xffffffffu, v, (int)from); }
OW_DEV u64 shfl64(u64 v, u32 from) { return __shfl_sync(0xffffffffu, (unsigned long long)v, (int)from); }
// mulhi and refill_16_bits multiply in assembly, so that the compiler does not use shifts
// instead. Multiplications run on a different pipe.
OW_DEV u32 mulhi(u32 a, u32 b) {
    u32 r;
    asm("mul.hi.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
OW_DEV u64 mulhi64(u64 a, u64 b) { return __umul64hi(a, b); }
// refill_16_bits sets x to x << 16 | w if x < 2^16.
OW_DEV void refill_16_bits(u32& x, u32 w) {
    asm("{\n.reg .pred p;\nsetp.lt.u32 p, %0, 65536;\n@p mad.lo.u32 %0, %0, 65536, %1;\n}" : "+r"(x) : "r"(w));
}
OW_DEV u32 umin(u32 a, u32 b) { return a < b ? a : b; }
// prmt picks four bytes of {b, a}, one per nibble of sel. Bit 3 of a nibble replicates the byte's sign bit.
OW_DEV u32 prmt(u32 a, u32 b, u32 sel) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(sel));
    return r;
}
// select_bits returns the bits of a where MASK is 1, and the bits of b where it is 0.
// It is in assembly because the compiler would emit two instructions.
template <u32 MASK> OW_DEV u32 select_bits(u32 a, u32 b) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(r) : "n"(MASK), "r"(a), "r"(b));
    return r;
}

// Shared memory. `volatile` keeps the accesses in source order in the PTX. ptxas may
// still reorder the loads.
OW_DEV u32 lds32(u32 a) { u32 v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a)); return v; }
OW_DEV u32 lds16(u32 a) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(a));
    return v;
}
OW_DEV u32x2 lds64(u32 a) {
    u32x2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
    return v;
}
OW_DEV u32x4 lds128(u32 a) {
    u32x4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
    return v;
}
OW_DEV u32 lds8(u32 a) { u32 v; asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(a)); return v; }
OW_DEV void sts8(u32 a, u32 v) { asm volatile("st.shared.u8 [%0], %1;" ::"r"(a), "h"((u16)v) : "memory"); }
OW_DEV void sts16(u32 a, u32 v) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(a), "h"((u16)v) : "memory"); }
OW_DEV void increment32(u32 a) { asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(a) : "memory"); }
OW_DEV void sts32(u32 a, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
OW_DEV void sts64(u32 a, u32x2 v) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(a), "r"(v.x), "r"(v.y) : "memory");
}
OW_DEV void sts128(u32 a, u32x4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Global memory. Each byte is read once and written once, so loads and wide stores have
// streaming cache hints. Addresses are multiples of the access size.
OW_DEV u32 ldg8(const u8* p) { return __ldcs(p); }
OW_DEV u32 ldg16(const u8* p) { return __ldcs((const u16*)p); }
OW_DEV u32 ldg32(const u8* p) { return __ldcs((const u32*)p); }
OW_DEV u32x2 ldg64(const u8* p) { uint2 v = __ldcs((const uint2*)p); return {v.x, v.y}; }
OW_DEV u32x4 ldg128(const u8* p) { uint4 v = __ldcs((const uint4*)p); return {v.x, v.y, v.z, v.w}; }
OW_DEV void stg8(u8* p, u32 v) { *p = (u8)v; }
OW_DEV void stg16(u8* p, u32 v) { *(u16*)p = (u16)v; }
OW_DEV void stg32(u8* p, u32 v) { __stcs((u32*)p, v); }
OW_DEV void stg64(u8* p, u32x2 v) { __stcs((uint2*)p, make_uint2(v.x, v.y)); }
OW_DEV void stg128(u8* p, u32x4 v) { __stcs((uint4*)p, make_uint4(v.x, v.y, v.z, v.w)); }
// Loads and stores of data that this warp writes and reads again: through the L1 cache, in
// program order.
OW_DEV u32 reload8(const u8* p) {
    u32 v;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
OW_DEV u32 reload32(const u8* p) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
OW_DEV void store_in_order8(u8* p, u32 v) { asm volatile("st.global.u8 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
OW_DEV void store_in_order32(u8* p, u32 v) { asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
// Copies bytes 0, 8, 16 and 24, except those at n or above. All loads precede all stores.
// The source may be output of this warp.
OW_DEV void copy_bytes_0_8_16_24(u8* to, const u8* from, int n) {
    asm volatile(
        "{\n.reg .pred p, q, r, s;\n.reg .u32 a, b, c, d;\n"
        "mov.u32 a, 0;\nmov.u32 b, 0;\nmov.u32 c, 0;\nmov.u32 d, 0;\n"  // else they stay live across iterations of a loop
        "setp.gt.s32 p, %2, 0;\nsetp.gt.s32 q, %2, 8;\nsetp.gt.s32 r, %2, 16;\nsetp.gt.s32 s, %2, 24;\n"
        "@p ld.global.u8 a, [%1];\n@q ld.global.u8 b, [%1+8];\n@r ld.global.u8 c, [%1+16];\n@s ld.global.u8 d, [%1+24];\n"
        "@p st.global.u8 [%0], a;\n@q st.global.u8 [%0+8], b;\n@r st.global.u8 [%0+16], c;\n@s st.global.u8 [%0+24], d;\n}" ::"l"(to),
        "l"(from), "r"(n)
        : "memory");
}
// copy_bytes_0_8 does the same for bytes 0 and 8 only.
OW_DEV void copy_bytes_0_8(u8* to, const u8* from, int n) {
    asm volatile(
        "{\n.reg .pred p, q;\n.reg .u32 a, b;\nmov.u32 a, 0;\nmov.u32 b, 0;\nsetp.gt.s32 p, %2, 0;\nsetp.gt.s32 q, %2, 8;\n"
        "@p ld.global.u8 a, [%1];\n@q ld.global.u8 b, [%1+8];\n@p st.global.u8 [%0], a;\n@q st.global.u8 [%0+8], b;\n}" ::"l"(to),
        "l"(from), "r"(n)
        : "memory");
}
OW_DEV void atomic_or(u32* word, u32 bits) { atomicOr(word, bits); }
OW_DEV void atomic_xor(u32* word, u32 bits) { atomicXor(word, bits); }
OW_DEV void atomic_add64(u64* word, u64 v) { atomicAdd((unsigned long long*)word, (unsigned long long)v); }

// Asynchronous copies of 16 bytes per lane. After wait_for_copies and a syncwarp, the
// copies of all lanes are visible to all lanes.
OW_DEV void copy_async16(u32 to, const u8* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
OW_DEV void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace ow

#else
#include "warp_host.h"
#endif
#endif
