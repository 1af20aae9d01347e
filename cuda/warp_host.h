// Implements warp.cuh on the host: a warp is 32 fibers on the calling thread.
//
// run_warp runs a body once for each lane. At every warp operation it switches to the
// next lane, in rising or falling order. Tests use both orders to find missing syncwarps:
// a body that works in only one order shares memory without a barrier. Accesses to shared
// memory are bounds-checked. If lanes execute different sequences of warp operations, the
// process aborts with a message.
#ifndef OVERWIRE_WARP_HOST_H
#define OVERWIRE_WARP_HOST_H

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define OW_DEV static inline
#define OW_METHOD inline
#define OW_TABLE static const
#define OW_COLD static inline
#define OW_UNROLL(n)

namespace ow {
namespace host {

constexpr u32 kSharedBytes = 64 << 10;
constexpr size_t kStack = 256 << 10;

struct Copy { u32 to, bytes; const u8* from; };

struct Warp {
    u32 now = 0;            // the running lane
    u32 next = 1;           // step to the next lane: 1 is rising order, 31 is falling
    u32 live = 0;           // lanes that have not returned
    u8 odd[32] = {};        // parity of the number of warp operations of each lane
    u32 slot[2][32] = {};   // operands of each lane, by parity of the operation
    bool done[32] = {};
    void* sp[33] = {};      // saved stack pointers; entry 32 is the caller's
    void (*body)(void*) = nullptr;
    void* arg = nullptr;
    u8* stacks = nullptr;
    alignas(16) u8 shared[kSharedBytes] = {};
    Copy copies[32][64] = {};
    u32 ncopies[32] = {};
#if !defined(__x86_64__)
    ucontext_t ctx[33];
#endif
};

inline Warp*& this_warp() {
    static thread_local Warp* w = nullptr;
    return w;
}

[[noreturn]] inline void die(const char* what) {
    fprintf(stderr, "warp: %s\n", what);
    abort();
}

#if defined(__x86_64__)
// Saves the callee-saved registers and the stack pointer, and switches to the other stack.
__attribute__((naked, noinline)) static void switch_stacks(void** /*save*/, void* /*load*/) {
    asm volatile(
        "pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n"
        "movq %rsp, (%rdi); movq %rsi, %rsp\n"
        "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
}
inline void switch_fiber(Warp* w, u32 from, u32 to) { switch_stacks(&w->sp[from], w->sp[to]); }
#else
inline void switch_fiber(Warp* w, u32 from, u32 to) { swapcontext(&w->ctx[from], &w->ctx[to]); }
#endif

inline void run_next_lane(Warp* w) {
    u32 from = w->now, to = (from + w->next) & 31;
    if (w->done[to]) die("lanes disagree on their warp operations");
    w->now = to;
    switch_fiber(w, from, to);
}

// Waits until every lane reaches this operation, and returns the operands of all lanes. Each
// lane runs until its next operation. run_next_lane aborts if the next lane has returned.
inline const u32* meet_lanes(u32 v) {
    Warp* w = this_warp();
    u32 lane = w->now;
    u32* slot = w->slot[w->odd[lane]];
    slot[lane] = v;
    w->odd[lane] ^= 1;
    run_next_lane(w);
    return slot;
}

inline void lane_main() {
    Warp* w = this_warp();
    w->body(w->arg);
    w = this_warp();
    u32 lane = w->now;
    if (w->ncopies[lane]) die("copies left in flight");
    w->done[lane] = true;
    if (--w->live == 0) {
        switch_fiber(w, lane, 32);
    } else {
        run_next_lane(w);
    }
    die("a finished lane was called");
}

// run_lanes calls body(arg) once for each of 32 lanes.
inline void run_lanes(void (*body)(void*), void* arg, bool falling, bool keep = false) {
    static thread_local Warp* w = nullptr;
    if (!w) {
        w = new Warp;
        w->stacks = (u8*)mmap(nullptr, 32 * kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (w->stacks == MAP_FAILED) die("no memory for stacks");
    }
    Warp* before = this_warp();
    if (before) die("warps do not nest");
    this_warp() = w;
    w->body = body;
    w->arg = arg;
    w->live = 32;
    w->next = falling ? 31 : 1;
    memset(w->odd, 0, sizeof w->odd);
    memset(w->done, 0, sizeof w->done);
    memset(w->ncopies, 0, sizeof w->ncopies);
    if (!keep) memset(w->shared, 0xdb, sizeof w->shared);  // bodies must not rely on zeroed memory
    for (u32 lane = 0; lane < 32; lane++) {
        u8* top = w->stacks + (lane + 1) * kStack;
#if defined(__x86_64__)
        void** s = (void**)top;
        *--s = nullptr;             // keeps the stack 16-byte aligned at entry
        *--s = (void*)lane_main;
        s -= 6;
        memset(s, 0, 6 * sizeof *s);
        w->sp[lane] = s;
#else
        getcontext(&w->ctx[lane]);
        w->ctx[lane].uc_stack.ss_sp = top - kStack;
        w->ctx[lane].uc_stack.ss_size = kStack;
        w->ctx[lane].uc_link = nullptr;
        makecontext(&w->ctx[lane], lane_main, 0);
#endif
    }
    w->now = falling ? 31 : 0;
    switch_fiber(w, 32, w->now);
    this_warp() = nullptr;
}

inline u8* shared_at(u32 a, u32 bytes) {
    if (a % (bytes < 16 ? bytes : 16) || a > kSharedBytes - bytes) die("bad shared address");
    return this_warp()->shared + a;
}

// On the device, misaligned accesses to global memory fault.
inline void check_aligned(const void* p, u32 n) {
    if ((uintptr_t)p % n) die("misaligned global access");
}

inline void defer_copy(Copy c) {
    Warp* w = this_warp();
    u32 lane = w->now;
    if (w->ncopies[lane] == 64) die("too many copies in flight");
    w->copies[lane][w->ncopies[lane]++] = c;
}

inline void land_copies(u32 lane) {
    Warp* w = this_warp();
    for (u32 i = 0; i < w->ncopies[lane]; i++) {
        const Copy& c = w->copies[lane][i];
        memcpy(w->shared + c.to, c.from, c.bytes);
    }
    w->ncopies[lane] = 0;
}

}  // namespace host

// run_warp calls f() once for each lane of one warp.
template <class F>
void run_warp(F f, bool falling = false) {
    host::run_lanes([](void* p) { (*(F*)p)(); }, &f, falling);
}

// run_phase runs one warp's part of a phase. Shared memory keeps its contents from the
// previous call, except if `first` is set.
template <class F>
void run_phase(F f, bool first, bool falling = false) {
    host::run_lanes([](void* p) { (*(F*)p)(); }, &f, falling, !first);
}

OW_DEV u32 lane_id() { return host::this_warp()->now; }
OW_DEV u32 lanes_below() { return (1u << lane_id()) - 1; }
OW_DEV u32 keep_in_register(u32 v) { return v; }
OW_DEV u32 ballot(bool p) {
    const u32* s = host::meet_lanes(p);
    u32 r = 0;
    for (u32 i = 0; i < 32; i++) r |= s[i] << i;
    return r;
}
OW_DEV u32 shfl(u32 v, u32 from) { return host::meet_lanes(v)[from & 31]; }
OW_DEV u32 or_of_lanes(u32 v) {
    const u32* s = host::meet_lanes(v);
    u32 r = 0;
    for (u32 i = 0; i < 32; i++) r |= s[i];
    return r;
}
OW_DEV u32 sum_of_lanes_to(u32 v) {
    const u32* s = host::meet_lanes(v);
    u32 r = 0;
    for (u32 i = 0; i <= lane_id(); i++) r += s[i];
    return r;
}
OW_DEV u32 bit(u32 n) { return n < 32 ? 1u << n : 0; }
OW_DEV u32 highest_bit(u32 v) { return 31 - (u32)__builtin_clz(v); }
OW_DEV void syncwarp() { host::meet_lanes(0); }
OW_DEV u32 popc(u32 v) { return (u32)__builtin_popcount(v); }
OW_DEV u32 lowest_bit(u32 v) { return (u32)__builtin_ctz(v); }
OW_DEV double dadd(double a, double b) { return a + b; }
OW_DEV double dmul(double a, double b) { return a * b; }
OW_DEV double shfl64f(double v, u32 from) {
    u32 h[2];
    memcpy(h, &v, 8);
    h[0] = shfl(h[0], from);
    h[1] = shfl(h[1], from);
    memcpy(&v, h, 8);
    return v;
}
OW_DEV u64 shfl64(u64 v, u32 from) {
    u32 low = shfl((u32)v, from);
    return (u64)shfl((u32)(v >> 32), from) << 32 | low;
}
OW_DEV u32 mulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
OW_DEV u64 mulhi64(u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }
OW_DEV void refill_16_bits(u32& x, u32 w) { if (x < 0x10000) x = x << 16 | w; }
OW_DEV u32 umin(u32 a, u32 b) { return a < b ? a : b; }
OW_DEV u32 prmt(u32 a, u32 b, u32 sel) {
    u64 v = (u64)b << 32 | a;
    u32 r = 0;
    for (u32 i = 0; i < 4; i++) {
        u32 s = sel >> (4 * i) & 15;
        u32 byte = (u32)(v >> (8 * (s & 7))) & 255;
        if (s & 8) byte = byte & 128 ? 255 : 0;
        r |= byte << (8 * i);
    }
    return r;
}
template <u32 MASK> u32 select_bits(u32 a, u32 b) { return (a & MASK) | (b & ~MASK); }

template <class T> T load_as(const u8* p) { T v; memcpy(&v, p, sizeof v); return v; }
OW_DEV u32 lds32(u32 a) { return load_as<u32>(host::shared_at(a, 4)); }
OW_DEV u32 lds16(u32 a) { return load_as<u16>(host::shared_at(a, 2)); }
OW_DEV u32x2 lds64(u32 a) { return load_as<u32x2>(host::shared_at(a, 8)); }
OW_DEV u32x4 lds128(u32 a) { return load_as<u32x4>(host::shared_at(a, 16)); }
OW_DEV u32 lds8(u32 a) { return *host::shared_at(a, 1); }
OW_DEV void sts8(u32 a, u32 v) { *host::shared_at(a, 1) = (u8)v; }
OW_DEV void sts16(u32 a, u32 v) { u16 h = (u16)v; memcpy(host::shared_at(a, 2), &h, 2); }
OW_DEV void increment32(u32 a) {
    u32 v = load_as<u32>(host::shared_at(a, 4)) + 1;
    memcpy(host::shared_at(a, 4), &v, 4);
}
OW_DEV void sts32(u32 a, u32 v) { memcpy(host::shared_at(a, 4), &v, 4); }
OW_DEV void sts64(u32 a, u32x2 v) { memcpy(host::shared_at(a, 8), &v, 8); }
OW_DEV void sts128(u32 a, u32x4 v) { memcpy(host::shared_at(a, 16), &v, 16); }

OW_DEV u32 ldg8(const u8* p) { return *p; }
OW_DEV u32 ldg16(const u8* p) { host::check_aligned(p, 2); return load_as<u16>(p); }
OW_DEV u32 ldg32(const u8* p) { host::check_aligned(p, 4); return load_as<u32>(p); }
OW_DEV u32x2 ldg64(const u8* p) { host::check_aligned(p, 8); return load_as<u32x2>(p); }
OW_DEV u32x4 ldg128(const u8* p) { host::check_aligned(p, 16); return load_as<u32x4>(p); }
OW_DEV void stg8(u8* p, u32 v) { *p = (u8)v; }
OW_DEV void stg16(u8* p, u32 v) { host::check_aligned(p, 2); u16 h = (u16)v; memcpy(p, &h, 2); }
OW_DEV void stg32(u8* p, u32 v) { host::check_aligned(p, 4); memcpy(p, &v, 4); }
OW_DEV void stg64(u8* p, u32x2 v) { host::check_aligned(p, 8); memcpy(p, &v, 8); }
OW_DEV void stg128(u8* p, u32x4 v) { host::check_aligned(p, 16); memcpy(p, &v, 16); }
OW_DEV u32 reload8(const u8* p) { return *p; }
OW_DEV u32 reload32(const u8* p) { host::check_aligned(p, 4); return load_as<u32>(p); }
OW_DEV void store_in_order8(u8* p, u32 v) { *p = (u8)v; }
OW_DEV void store_in_order32(u8* p, u32 v) { stg32(p, v); }
OW_DEV void copy_bytes_0_8_16_24(u8* to, const u8* from, int n) {
    for (int i = 0; i < 32 && i < n; i += 8) to[i] = from[i];
}
OW_DEV void copy_bytes_0_8(u8* to, const u8* from, int n) { copy_bytes_0_8_16_24(to, from, n < 16 ? n : 16); }
OW_DEV void atomic_or(u32* word, u32 bits) { __atomic_fetch_or(word, bits, __ATOMIC_RELAXED); }
OW_DEV void atomic_xor(u32* word, u32 bits) { __atomic_fetch_xor(word, bits, __ATOMIC_RELAXED); }
OW_DEV void atomic_add64(u64* word, u64 v) { __atomic_fetch_add(word, v, __ATOMIC_RELAXED); }

OW_DEV void copy_async16(u32 to, const u8* from) {
    host::check_aligned(from, 16);
    host::shared_at(to, 16);
    host::defer_copy({to, 16, from});
}
OW_DEV void wait_for_copies() { host::land_copies(lane_id()); }

}  // namespace ow
#endif
