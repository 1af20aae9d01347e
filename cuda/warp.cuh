// What a warp can do, once for the device and once for the host.
//
// Kernel bodies are written against this file alone. nvcc compiles the device
// side to single instructions. Any C++17 compiler without CUDA compiles the
// host side: 32 fibers on one thread, every warp operation a rendezvous, shared
// memory a bounds-checked array, asynchronous copies held back until they are
// waited for. So one text is the GPU's decoder and its own host twin.
//
// Rules for bodies: all lanes execute the same sequence of warp operations
// (the host side aborts when they do not); shared memory is addressed by 32-bit
// byte addresses through lds/sts; no block-wide operation. What several warps of
// a block do together is cut into phases, with a barrier between them; on the
// host each warp in turn runs a phase (run_phase), shared memory stays.
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
#define OW_COLD static __device__ __noinline__  // called, not inlined: once a chunk
#define OW_PRAGMA(x) _Pragma(#x)
#define OW_UNROLL(n) OW_PRAGMA(unroll n)  // for nvcc only

namespace ow {

OW_DEV u32 lane_id() { return threadIdx.x & 31; }
// The same in all lanes, and known to be: what depends on it does not diverge.
OW_DEV u32 warp_of_block() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }
OW_DEV u32 lanes_below() {
    u32 m;
    asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(m));
    return m;
}
// keep_in_register makes a value one that the compiler holds in a register and does not
// compute anew.
OW_DEV u32 keep_in_register(u32 v) {
    asm volatile("" : "+r"(v));
    return v;
}
OW_DEV u32 ballot(bool p) { return __ballot_sync(0xffffffffu, p); }
OW_DEV u32 shfl(u32 v, u32 from) { return __shfl_sync(0xffffffffu, v, (int)from); }
// The bits that are set in any lane.
OW_DEV u32 or_of_lanes(u32 v) { return __reduce_or_sync(0xffffffffu, v); }
// The sum over the lanes up to this one.
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
OW_DEV u32 highest_bit(u32 v) { return 31 - (u32)__clz((int)v); }  // of the bits that are set; v is not 0
OW_DEV u32 popc(u32 v) { return (u32)__popc((int)v); }
OW_DEV u32 lowest_bit(u32 v) { return (u32)__ffs((int)v) - 1; }  // of the bits that are set; v is not 0
// Doubles without contraction: the same bits as the Go encoder's.
OW_DEV double dadd(double a, double b) { return __dadd_rn(a, b); }
OW_DEV double dmul(double a, double b) { return __dmul_rn(a, b); }
OW_DEV double shfl64f(double v, u32 from) { return __shfl_sync(0xffffffffu, v, (int)from); }
OW_DEV u64 shfl64(u64 v, u32 from) { return __shfl_sync(0xffffffffu, (unsigned long long)v, (int)from); }
// Products the compiler must not turn into shifts: they go to another pipe.
OW_DEV u32 mulhi(u32 a, u32 b) {
    u32 r;
    asm("mul.hi.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
// x = x << 16 | w where x < 2^16.
OW_DEV void refill_16_bits(u32& x, u32 w) {
    asm("{\n.reg .pred p;\nsetp.lt.u32 p, %0, 65536;\n@p mad.lo.u32 %0, %0, 65536, %1;\n}" : "+r"(x) : "r"(w));
}
OW_DEV u32 umin(u32 a, u32 b) { return a < b ? a : b; }
// prmt picks four bytes of {b, a}; selector bit 3 of a nibble spreads the sign.
OW_DEV u32 prmt(u32 a, u32 b, u32 sel) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(sel));
    return r;
}
// select_bits returns a where mask has ones and b where it has zeros.
// Said in assembly, or the compiler splits it in two.
template <u32 MASK> OW_DEV u32 select_bits(u32 a, u32 b) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(r) : "n"(MASK), "r"(a), "r"(b));
    return r;
}

// Shared memory. `volatile` keeps the order of source text; ptxas still
// schedules the loads freely.
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

// Global memory: each byte is read once and written once, so nothing asks for
// a place in the caches. Addresses are multiples of the access size.
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
// What this warp wrote itself: through the first-level cache, in order.
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
// Copies bytes 0, 8, 16, 24 of what this warp wrote, as far as they are below n: all
// loads, then all stores.
OW_DEV void copy_bytes_0_8_16_24(u8* to, const u8* from, int n) {
    asm volatile(
        "{\n.reg .pred p, q, r, s;\n.reg .u32 a, b, c, d;\n"
        "mov.u32 a, 0;\nmov.u32 b, 0;\nmov.u32 c, 0;\nmov.u32 d, 0;\n"  // or they live on from turn to turn of a loop
        "setp.gt.s32 p, %2, 0;\nsetp.gt.s32 q, %2, 8;\nsetp.gt.s32 r, %2, 16;\nsetp.gt.s32 s, %2, 24;\n"
        "@p ld.global.u8 a, [%1];\n@q ld.global.u8 b, [%1+8];\n@r ld.global.u8 c, [%1+16];\n@s ld.global.u8 d, [%1+24];\n"
        "@p st.global.u8 [%0], a;\n@q st.global.u8 [%0+8], b;\n@r st.global.u8 [%0+16], c;\n@s st.global.u8 [%0+24], d;\n}" ::"l"(to),
        "l"(from), "r"(n)
        : "memory");
}
// The same of bytes 0 and 8.
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

// Asynchronous copies of 16 bytes a lane. After wait_for_copies and a syncwarp every
// lane sees what every lane copied.
OW_DEV void copy_async16(u32 to, const u8* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
OW_DEV void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace ow

#else
#include "warp_host.h"
#endif
#endif
