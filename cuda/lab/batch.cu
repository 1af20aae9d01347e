// The batch kernels on a GPU: held to their host twins, then timed.
//
//   g++ -std=c++17 -O2 -c ../batch_host.cc ../stream_host.cc
//   nvcc -std=c++17 -O3 -arch=native batch.cu batch_host.o stream_host.o -o batch -lpthread -ldl
//   batch [--check] [--mib OUT] [--reps R] [--only lz4|snappy|cascaded|x16] [--nvcomp libnvcomp.so.5]
//
// --check: no times. --nvcomp: its decoders beside ours, on the same blocks.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>

#include "../batch.cu"
#include "../stream.cu"
#include "../x16_decode.cu"
#include "batch_content.h"
#include "x16_encode.h"

extern "C" {
void ow_lz4_decode_host(ow_batch_item*, uint32_t);
void ow_snappy_decode_host(ow_batch_item*, uint32_t);
void ow_cascaded_decode_host(ow_batch_item*, uint32_t);
void ow_stream_x16_host(const ow_stream_head*, uint32_t, uint32_t*);
void ow_x16_encode_host(ow_batch_item*, uint32_t);
}

#define CK(call)                                                                                   \
    do {                                                                                           \
        cudaError_t e_ = (call);                                                                   \
        if (e_ != cudaSuccess) {                                                                   \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); \
            exit(2);                                                                               \
        }                                                                                          \
    } while (0)

// Other numbers of blocks an SM, to see what registers are worth.
#define OW_LAB_KERNEL(name, Format, N)                                                                           \
    extern "C" __global__ void __launch_bounds__(OW_BATCH_THREADS, N) name(ow_batch_item* items, uint32_t n) {       \
        __shared__ __align__(1024) ow::u8 shared[ow::kLzShared];                                                     \
        uint32_t warp = ow::warp_of_block(), job = blockIdx.x * OW_BATCH_WARPS + warp;                               \
        if (job < n) ow::lz_job<Format>(items, job, (uint32_t)__cvta_generic_to_shared(shared), warp);               \
    }
#define OW_LAB_BOUNDS(N)                          \
    OW_LAB_KERNEL(lab_lz4_##N, ow::Lz4, N)        \
    OW_LAB_KERNEL(lab_snappy_##N, ow::Snappy, N)
OW_LAB_BOUNDS(8)
OW_LAB_BOUNDS(10)
OW_LAB_BOUNDS(16)

// ow_stream_x16 likewise.
#define OW_LAB_STREAM(N)                                                                                             \
    extern "C" __global__ void __launch_bounds__(32 * OW_X16_WARPS, N)                                               \
        lab_stream_##N(const ow_stream_head* head, const void*, uint32_t n, uint32_t* status, const __grid_constant__ ow_stream_few few) { \
        extern __shared__ __align__(1024) ow::u32 room[];                                                            \
        uint32_t warp = ow::warp_of_block(), job = blockIdx.x * OW_X16_WARPS + warp, base = (uint32_t)__cvta_generic_to_shared(room); \
        if (job >= n) return;                                                                                        \
        ow::X16Place place = ow::x16_place<ow::X16Best>(base, warp, OW_X16_WARPS);                                   \
        ow::stream_x16(head ? head : &few.head, job, status, place, base + OW_X16_SHARED + 32 * warp);               \
    }
OW_LAB_STREAM(5)
OW_LAB_STREAM(6)

namespace {

typedef void (*Kernel)(ow_batch_item*, uint32_t);

template <class F> void parallel(size_t n, F f) {
    std::atomic<size_t> next{0};
    std::vector<std::thread> pool;
    for (unsigned w = 0; w < std::max(1u, std::thread::hardware_concurrency()); w++) {
        pool.emplace_back([&] { for (size_t i; (i = next++) < n;) f(i); });
    }
    for (auto& t : pool) t.join();
}

// -- device and host side by side ---------------------------------------------

template <class T> T* device(size_t n) {
    void* p;
    CK(cudaMalloc(&p, std::max<size_t>(1, n) * sizeof(T)));
    return (T*)p;
}
template <class T> T* upload(const std::vector<T>& v) {
    T* p = device<T>(v.size());
    CK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

struct Input { Bytes src; size_t cap; uint32_t arg; };

// check runs inputs through a kernel and its host twin, guard zones between all
// outputs, sources at any alignment (or multiples of 16). The same statuses,
// lengths and bytes are asked for; what came out is left in `outs`.
int check(const char* name, std::function<void(ow_batch_item*, uint32_t)> kernel, std::function<void(ow_batch_item*, uint32_t)> twin,
          const std::vector<Input>& in, bool aligned, std::vector<Bytes>* outs = nullptr, std::vector<uint32_t>* args = nullptr) {
    constexpr size_t kGuard = 64;
    std::vector<size_t> from, to;
    size_t a = 0, b = kGuard;
    for (size_t i = 0; i < in.size(); i++) {
        if (aligned) a = (a + 15) / 16 * 16, b = (b + 15) / 16 * 16;
        from.push_back(a), to.push_back(b);
        a += in[i].src.size() + (aligned ? 0 : i % 7);
        b += in[i].cap + kGuard + (aligned ? 0 : i % 5);
    }
    Bytes src(a + 16), dst(b, 0xa5), got(b);
    for (size_t i = 0; i < in.size(); i++) std::copy(in[i].src.begin(), in[i].src.end(), src.begin() + from[i]);
    uint8_t *dsrc = upload(src), *ddst = upload(dst);
    // The twin's memory is aligned as the device's.
    uint8_t *hsrc = (uint8_t*)aligned_alloc(256, (src.size() + 255) / 256 * 256), *hdst = (uint8_t*)aligned_alloc(256, (b + 255) / 256 * 256);
    memcpy(hsrc, src.data(), src.size()), memcpy(hdst, dst.data(), b);
    std::vector<ow_batch_item> items, host;
    for (size_t i = 0; i < in.size(); i++) {
        items.push_back({(uint64_t)(dsrc + from[i]), in[i].src.size(), (uint64_t)(ddst + to[i]), in[i].cap, 77, 0, in[i].arg});
        host.push_back({(uint64_t)(hsrc + from[i]), in[i].src.size(), (uint64_t)(hdst + to[i]), in[i].cap, 77, 0, in[i].arg});
    }
    ow_batch_item* ditems = upload(items);
    kernel(ditems, items.size());
    CK(cudaGetLastError());
    CK(cudaDeviceSynchronize());
    CK(cudaMemcpy(items.data(), ditems, items.size() * sizeof items[0], cudaMemcpyDeviceToHost));
    CK(cudaMemcpy(got.data(), ddst, b, cudaMemcpyDeviceToHost));
    parallel(in.size(), [&](size_t i) { twin(&host[i], 1); });
    int bad = 0, refused = 0;
    size_t end = 0;
    for (size_t i = 0; i < in.size(); i++) {
        const ow_batch_item &d = items[i], &h = host[i];
        bool same = d.status == h.status && d.written == h.written && d.arg == h.arg;
        same = same && (d.status || memcmp(&got[to[i]], hdst + to[i], d.written) == 0);
        bool guards = true;
        for (size_t k = end; k < to[i]; k++) guards &= got[k] == 0xa5;
        end = to[i] + in[i].cap;
        refused += d.status != 0;
        if ((!same || !guards) && bad++ < 5) {
            printf("FAIL %s item %zu (%zu -> %zu, arg %#x): status %u, %llu bytes; twin %u, %llu; guards %s\n", name, i, in[i].src.size(), in[i].cap,
                   in[i].arg, d.status, (unsigned long long)d.written, h.status, (unsigned long long)h.written, guards ? "good" : "BROKEN");
        }
        if (outs) outs->push_back(Bytes(got.begin() + to[i], got.begin() + to[i] + (d.status ? 0 : d.written)));
        if (args) args->push_back(d.arg);
    }
    for (size_t k = end; k < b; k++) bad += got[k] != 0xa5;
    for (void* p : {(void*)dsrc, (void*)ddst, (void*)ditems}) CK(cudaFree(p));
    free(hsrc), free(hdst);
    printf("check %-14s %5zu items, %4d refused, %d failures\n", name, in.size(), refused, bad);
    fflush(stdout);
    return bad;
}

// launched is a kernel of items as check calls it.
std::function<void(ow_batch_item*, uint32_t)> launched(Kernel kernel, uint32_t per) {
    return [=](ow_batch_item* items, uint32_t n) { kernel<<<ow_batch_blocks(per, n), OW_BATCH_THREADS>>>(items, n); };
}

// Raw streams of X16: the statuses of ow_stream_x16 and of its twin, as items.
std::vector<ow_stream> raw_streams(const std::vector<ow_batch_item>& items) {
    std::vector<ow_stream> out;
    for (uint32_t i = 0; i < items.size(); i++) {
        const ow_batch_item& it = items[i];
        out.push_back({it.src + 8, it.src_len - 8, it.dst, it.dst_cap, it.dst_cap, i, 1, OW_STREAM_RAW, OW_STREAM_X16, 0, 0});
    }
    return out;
}
void say(std::vector<ow_batch_item>& items, const uint32_t* status) {
    for (size_t i = 0; i < items.size(); i++) items[i].status = status[i], items[i].written = status[i] ? 0 : items[i].dst_cap;
}
void decode_x16(ow_batch_item* ditems, uint32_t n) {
    std::vector<ow_batch_item> items(n);
    CK(cudaMemcpy(items.data(), ditems, n * sizeof items[0], cudaMemcpyDeviceToHost));
    std::vector<ow_stream> streams = raw_streams(items);
    std::vector<uint8_t> table(sizeof(ow_stream_head) + n * sizeof streams[0]);
    ow_stream_head head = {n, n, 2, 0, 0, 0};
    memcpy(table.data(), &head, sizeof head);
    memcpy(table.data() + sizeof head, streams.data(), n * sizeof streams[0]);
    uint8_t* dtable = upload(table);
    std::vector<uint32_t> status(n);
    uint32_t* dstatus = upload(status);
    ow_stream_x16<<<(2 * n + OW_X16_WARPS - 1) / OW_X16_WARPS, 32 * OW_X16_WARPS, OW_STREAM_SHARED>>>((ow_stream_head*)dtable, nullptr, 2 * n, dstatus, {});
    CK(cudaMemcpy(status.data(), dstatus, 4 * n, cudaMemcpyDeviceToHost));
    say(items, status.data());
    CK(cudaMemcpy(ditems, items.data(), n * sizeof items[0], cudaMemcpyHostToDevice));
    for (void* p : {(void*)dtable, (void*)dstatus}) CK(cudaFree(p));
}
void decode_x16_host(ow_batch_item* item, uint32_t) {
    std::vector<ow_batch_item> items = {*item};
    ow_stream_few few = {{1, 1, 2, 0, 0, 0}, {raw_streams(items)[0]}};
    few.streams[0].first = 0;
    uint32_t status = 0;
    ow_stream_x16_host(&few.head, 2, &status);
    say(items, &status);
    *item = items[0];
}
// A chunk as decode_x16 takes it: eight bytes of anything, its block's head, the chunk.
Bytes block_of(const Bytes& chunk, size_t size, uint32_t arg) {
    Bytes b(8);
    for (uint32_t v : {1 | (arg & 255) << 8 | arg >> 16 << 16, (uint32_t)size}) b.insert(b.end(), (uint8_t*)&v, (uint8_t*)(&v + 1));
    b.insert(b.end(), chunk.begin(), chunk.end());
    return b;
}

int check_lz(const char* name, Kernel kernel, void (*twin)(ow_batch_item*, uint32_t), Bytes (*make)(const Bytes&)) {
    std::mt19937_64 rng(1);
    std::vector<Input> in;
    std::vector<Bytes> want, outs;
    for (int i = 0; i < 3000; i++) {
        Bytes b = content(i % kKindCount, i < 40 ? i * 3 : rng() % (i % 50 ? 4000 : 70000), i);
        for (size_t k = 0; i % 5 == 0 && k + 40 < b.size(); k += 1 + rng() % 3000) b[k] ^= rng();
        if (make == cascaded) b.resize(b.size() / 4 * 4);
        Input p = {make(b), b.size() + (i % 3 == 0) * (rng() % 50), 0};
        if (i % 2) {
            for (int k = rng() % 4; k >= 0 && !p.src.empty(); k--) p.src[rng() % p.src.size()] = rng();
            if (i % 7 == 0) p.src.resize(rng() % (p.src.size() + 1));
            b.clear();
        }
        want.push_back(b);
        in.push_back(std::move(p));
    }
    int bad = check(name, launched(kernel, OW_BATCH_WARPS), twin, in, false, &outs);
    for (size_t i = 0; i < in.size(); i += 2) bad += outs[i] != want[i];
    if (bad) printf("FAIL %s: other content\n", name);
    return bad;
}

int check_x16() {
    std::vector<Input> in, back;
    std::mt19937_64 rng(2);
    for (int tr = OW_BF16; tr <= OW_BYTES; tr++) {
        for (size_t n : {(size_t)3000, (size_t)4096, (size_t)20011, (size_t)65536, (size_t)(1 << 18) + 99}) {
            for (int wild : {0, 3, 200}) in.push_back({lab::weights(tr, n, rng(), wild), n, (uint32_t)tr});
        }
        in.push_back({Bytes(9000, 0x3c), 9000, (uint32_t)tr});
        in.push_back({content(0, 9000, tr), 9000, (uint32_t)tr});
    }
    std::vector<Bytes> chunks, outs;
    std::vector<uint32_t> args;
    int bad = check("x16 encode", launched(ow_x16_encode, 1), ow_x16_encode_host, in, true, &chunks, &args);
    std::vector<const Bytes*> want;
    for (size_t i = 0; i < in.size(); i++) {
        if (chunks[i].empty()) continue;
        back.push_back({block_of(chunks[i], in[i].src.size(), args[i]), in[i].src.size(), args[i]});
        want.push_back(&in[i].src);
        for (int k = 0; k < 6; k++) {  // damaged
            if (chunks[i].size() > 30000) break;
            Bytes b = chunks[i];
            b[rng() % (k % 2 ? b.size() : std::min<size_t>(b.size(), 200))] ^= 1 << rng() % 8;
            if (k == 5) b.resize(rng() % b.size());
            back.push_back({block_of(b, in[i].src.size(), args[i]), in[i].src.size(), args[i]});
            want.push_back(nullptr);
        }
    }
    // Chunks of another encoder.
    std::vector<Bytes> plain;
    plain.reserve(24);
    for (int tr = OW_BF16; tr <= OW_BYTES; tr++) {
        for (uint32_t tiles : {1u, 16u, 256u}) {
            plain.push_back(lab::weights(tr, 50000 + tr, rng(), 3));
            uint32_t arg = tr | tiles << 16;
            back.push_back({block_of(lab::encode(tr, plain.back().data(), plain.back().size(), tiles), plain.back().size(), arg), plain.back().size(), arg});
            want.push_back(&plain.back());
        }
    }
    bad += check("x16 decode", decode_x16, decode_x16_host, back, true, &outs);
    int other = 0;
    for (size_t i = 0; i < back.size(); i++) other += want[i] && outs[i] != *want[i];
    if (other) printf("FAIL x16: %d chunks of other content\n", other);
    return bad + other;
}

// -- times --------------------------------------------------------------------

template <class F> double median_ms(int reps, F f) {
    cudaEvent_t a, b;
    CK(cudaEventCreate(&a));
    CK(cudaEventCreate(&b));
    std::vector<float> t;
    for (int i = 0; i < reps + 1; i++) {
        CK(cudaEventRecord(a));
        f();
        CK(cudaEventRecord(b));
        CK(cudaEventSynchronize(b));
        float ms;
        CK(cudaEventElapsedTime(&ms, a, b));
        if (i) t.push_back(ms);  // the first warms up
    }
    CK(cudaGetLastError());
    CK(cudaEventDestroy(a));
    CK(cudaEventDestroy(b));
    std::sort(t.begin(), t.end());
    return t[t.size() / 2];
}

// Counts bytes of `n` chunks that differ from those they were made of.
__global__ void compare_kernel(const uint4* out, const uint4* ref, uint32_t units, uint32_t n, uint32_t unique, unsigned long long* bad) {
    unsigned long long c = 0, total = (unsigned long long)units * n;
    for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; i < total; i += (unsigned long long)gridDim.x * blockDim.x) {
        uint4 a = out[i], b = ref[i / units % unique * units + i % units];
        c += a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w;
    }
    if (c) atomicAdd(bad, c);
}

// nvCOMP's batched decoders, if their library was named: facts of its headers.
struct Options { char bytes[64]; };
// Version 6 left a name's end out and added the stream.
typedef int (*Temp)(size_t, size_t, Options, size_t*, size_t, cudaStream_t);
typedef int (*Decompress)(const void* const*, const size_t*, const size_t*, size_t*, size_t, void*, size_t, void* const*, Options, int*, cudaStream_t);
void* nvcomp = nullptr;

// A Field is `n` chunks of `chunk` bytes in device memory, made of a few.
struct Field {
    uint32_t n, chunk, unique;
    double ratio = 0;
    uint8_t *src, *dst, *ref;
    std::vector<ow_batch_item> items;
    ow_batch_item* ditems;
    unsigned long long* bad;

    // plain: what comes out; stored: what goes in, one of each unique chunk.
    Field(uint32_t n, uint32_t chunk, const std::vector<Bytes>& plain, const std::vector<Bytes>& stored, const std::vector<uint32_t>& args)
        : n(n), chunk(chunk), unique(stored.size()) {
        std::vector<size_t> at(n);
        size_t total = 0, sum = 0;
        for (uint32_t i = 0; i < n; i++) {
            at[i] = total;
            total += (stored[i % unique].size() + 15) / 16 * 16;
            sum += stored[i % unique].size();
        }
        ratio = (double)sum / n / plain[0].size();
        src = device<uint8_t>(total);
        dst = device<uint8_t>((size_t)n * chunk);
        ref = device<uint8_t>((size_t)unique * chunk);
        bad = device<unsigned long long>(1);
        for (uint32_t i = 0; i < n; i++) {
            const Bytes& s = stored[i % unique];
            if (i < unique) {
                CK(cudaMemcpy(src + at[i], s.data(), s.size(), cudaMemcpyHostToDevice));
                CK(cudaMemcpy(ref + (size_t)i * chunk, plain[i].data(), plain[i].size(), cudaMemcpyHostToDevice));
            } else {
                CK(cudaMemcpyAsync(src + at[i], src + at[i % unique], s.size(), cudaMemcpyDeviceToDevice));
            }
            items.push_back({(uint64_t)(src + at[i]), s.size(), (uint64_t)(dst + (size_t)i * chunk), chunk, 0, 0, args[i % unique]});
        }
        ditems = upload(items);
        CK(cudaDeviceSynchronize());
    }
    ~Field() {
        for (void* p : {(void*)src, (void*)dst, (void*)ref, (void*)ditems, (void*)bad}) cudaFree(p);
    }
    bool verify(std::function<void()> run) {
        CK(cudaMemset(dst, 0xa5, (size_t)n * chunk));
        CK(cudaMemset(bad, 0, 8));
        run();
        compare_kernel<<<1024, 256>>>((uint4*)dst, (uint4*)ref, chunk / 16, n, unique, bad);
        CK(cudaDeviceSynchronize());
        unsigned long long wrong;
        CK(cudaMemcpy(&wrong, bad, 8, cudaMemcpyDeviceToHost));
        return wrong == 0;
    }
    // row verifies and times a kernel that makes the chunks.
    bool row(const char* name, const char* kind, Kernel kernel, uint32_t per, int reps) {
        auto run = [&] { kernel<<<ow_batch_blocks(per, n), OW_BATCH_THREADS>>>(ditems, n); };
        bool good = verify(run);
        double ms = median_ms(reps, run);
        cudaFuncAttributes at;
        CK(cudaFuncGetAttributes(&at, kernel));
        printf("%-18s %-7s %4u KiB  ratio %.3f  %s  %7.1f GB/s out  %8.3f ms  %d regs %zu stack\n", name, kind, chunk >> 10, ratio,
               good ? "exact" : "WRONG", (double)n * chunk / ms / 1e6, ms, at.numRegs, at.localSizeBytes);
        fflush(stdout);
        return good;
    }
    void theirs(const char* name, const char* kind, int reps) {
        if (!nvcomp) return;
        std::string base = std::string("nvcompBatched") + name;
        Temp temp = (Temp)dlsym(nvcomp, (base + "DecompressGetTempSizeAsync").c_str());
        if (!temp) temp = (Temp)dlsym(nvcomp, (base + "DecompressGetTempSize").c_str());
        Decompress go = (Decompress)dlsym(nvcomp, (base + "DecompressAsync").c_str());
        if (!temp || !go) return (void)printf("nvCOMP %s: no such functions\n", name);
        Options none = {};
        std::vector<void*> in, out;
        std::vector<size_t> len, cap(n, chunk);
        for (const ow_batch_item& it : items) in.push_back((void*)it.src), out.push_back((void*)it.dst), len.push_back(it.src_len);
        void **din = upload(in), **dout = upload(out);
        size_t *dlen = upload(len), *dcap = upload(cap), *dmade = device<size_t>(n), bytes = 0;
        int* status = device<int>(n);
        if (int rc = temp(n, chunk, none, &bytes, (size_t)n * chunk, 0)) return (void)printf("nvCOMP %s: %d\n", name, rc);
        uint8_t* room = device<uint8_t>(bytes);
        int rc = 0;
        auto run = [&] { rc = go(din, dlen, dcap, dmade, n, room, bytes, dout, none, status, 0); };
        bool good = verify(run);
        double ms = median_ms(reps, run);
        printf("%-18s %-7s %4u KiB  ratio %.3f  %s  %7.1f GB/s out  %8.3f ms  rc %d, %zu MiB of scratch\n", ("nvCOMP " + std::string(name)).c_str(),
               kind, chunk >> 10, ratio, good ? "exact" : "WRONG", (double)n * chunk / ms / 1e6, ms, rc, bytes >> 20);
        fflush(stdout);
        for (void* p : {(void*)din, (void*)dout, (void*)dlen, (void*)dcap, (void*)dmade, (void*)status, (void*)room}) CK(cudaFree(p));
    }
};

int time_lz(const std::string& only, uint32_t mib, int reps) {
    int bad = 0;
    for (int kind = 0; kind < kKindCount; kind++) {
        uint32_t chunk = 64 << 10, unique = 256;
        std::vector<Bytes> plain(unique), a(unique), b(unique), c(unique);
        parallel(unique, [&](size_t i) {
            plain[i] = content(kind, chunk, 100 + i);
            a[i] = lz4(plain[i]);
            b[i] = snappy(plain[i]);
            c[i] = cascaded(plain[i]);
        });
        std::vector<uint32_t> none(unique, 0);
        if (only.empty() || only == "lz4") {
            Field f(mib * 16, chunk, plain, a, none);
            bad += !f.row("lz4", kKinds[kind], ow_lz4_decode, OW_BATCH_WARPS, reps);
            int blocks[] = {8, 10, 16}, i = 0;
            for (auto k : {lab_lz4_8, lab_lz4_10, lab_lz4_16}) bad += !f.row(("  " + std::to_string(blocks[i++]) + " blocks an SM").c_str(), kKinds[kind], k, OW_BATCH_WARPS, reps);
            f.theirs("LZ4", kKinds[kind], reps);
        }
        if (only.empty() || only == "snappy") {
            Field f(mib * 16, chunk, plain, b, none);
            bad += !f.row("snappy", kKinds[kind], ow_snappy_decode, OW_BATCH_WARPS, reps);
            int blocks[] = {8, 10, 16}, i = 0;
            for (auto k : {lab_snappy_8, lab_snappy_10, lab_snappy_16}) bad += !f.row(("  " + std::to_string(blocks[i++]) + " blocks an SM").c_str(), kKinds[kind], k, OW_BATCH_WARPS, reps);
            f.theirs("Snappy", kKinds[kind], reps);
        }
        if (only.empty() || only == "cascaded") {
            Field f(mib * 16, chunk, plain, c, none);
            bad += !f.row("cascaded", kKinds[kind], ow_cascaded_decode, OW_BATCH_WARPS, reps);
            f.theirs("Cascaded", kKinds[kind], reps);
        }
    }
    return bad;
}

// One chunk size of one transform: encode into slots, decode what came out.
int time_x16(int tr, uint32_t chunk, uint32_t mib, int reps) {
    uint32_t unique = std::max(1u, (8u << 20) / chunk), n = (uint32_t)(((uint64_t)mib << 20) / chunk);
    std::vector<Bytes> plain(unique);
    parallel(unique, [&](size_t i) { plain[i] = lab::weights(tr, chunk, 1000 + i); });
    size_t total = (size_t)n * chunk;
    // The blocks lie in a native stream, each behind eight bytes of its own head.
    size_t stride = chunk + 16, tables = 64 + 16 * (size_t)n, bytes = tables + n * stride;
    uint8_t *in = device<uint8_t>(total), *stream = device<uint8_t>(bytes), *mid = stream + tables + 16, *out = device<uint8_t>(total);
    for (uint32_t i = 0; i < n; i++) {
        if (i < unique) CK(cudaMemcpy(in + (size_t)i * chunk, plain[i].data(), chunk, cudaMemcpyHostToDevice));
        else CK(cudaMemcpyAsync(in + (size_t)i * chunk, in + (size_t)(i % unique) * chunk, chunk, cudaMemcpyDeviceToDevice));
    }
    std::vector<ow_batch_item> items;
    for (uint32_t i = 0; i < n; i++) items.push_back({(uint64_t)(in + (size_t)i * chunk), chunk, (uint64_t)(mid + i * stride), chunk, 0, 0, (uint32_t)tr});
    ow_batch_item* d = upload(items);
    auto encode = [&] { ow_x16_encode<<<n, ow_x16_threads(chunk)>>>(d, n); };
    encode();
    CK(cudaDeviceSynchronize());
    CK(cudaMemcpy(items.data(), d, n * sizeof items[0], cudaMemcpyDeviceToHost));
    size_t sum = 0, refused = 0;
    for (uint32_t i = 0; i < n; i++) {
        sum += items[i].written;
        refused += items[i].status != 0;
        items[i] = {items[i].dst, items[i].written, (uint64_t)(out + (size_t)i * chunk), chunk, 0, 0, items[i].arg};
    }
    double ms = median_ms(reps, encode);
    uint32_t tiles = chunk / lab::tile_bytes(tr), segs = tiles / std::max(1u, items[0].arg >> 16);
    unsigned long long* bad = device<unsigned long long>(1);
    unsigned long long wrong = 0;
    printf("x16 %-8s %4u KiB  ratio %.4f  %s  encode %7.1f GB/s in (%.3f ms)\n", lab::layout(tr).name, chunk >> 10, (double)sum / total,
           refused ? "WRONG" : "exact", total / ms / 1e6, ms);
    // Decoded as streams, by several warps per chunk, and by a list of segments.
    std::vector<ow_x16_chunk> chunks;
    std::vector<ow_x16_seg> list;
    std::vector<uint64_t> head(8 + 2 * n), heads(n);
    head[0] = 0x52911327 | (uint64_t)'X' << 48;
    head[1] = n * stride, head[2] = total, head[3] = n, head[4] = chunk, head[5] = tables, head[6] = (uint64_t)1 << 32;
    for (uint32_t i = 0; i < n; i++) {
        head[8 + i] = i * stride + 8, head[8 + n + i] = items[i].src_len + 8;
        heads[i] = 1 | tr << 8 | (uint64_t)(items[i].arg >> 16) << 16 | (uint64_t)chunk << 32;
        chunks.push_back({items[i].src, items[i].dst, (uint32_t)items[i].src_len, chunk, (uint16_t)(items[i].arg >> 16), (uint16_t)tr, 0});
        for (uint32_t k = 0; k < segs; k++) list.push_back({i, k});
    }
    CK(cudaMemcpy(stream, head.data(), tables, cudaMemcpyHostToDevice));
    CK(cudaMemcpy2D(mid - 8, stride, heads.data(), 8, 8, n, cudaMemcpyHostToDevice));
    ow_x16_chunk* dchunks = upload(chunks);
    ow_x16_seg* dlist = upload(list);
    uint32_t* status = device<uint32_t>(1);
    CK(cudaMemset(status, 0, 4));
    auto row = [&](const char* name, uint32_t split, std::function<void()> run) {
        CK(cudaMemset(out, 0xa5, total));
        CK(cudaMemset(bad, 0, 8));
        run();
        compare_kernel<<<1024, 256>>>((uint4*)out, (uint4*)in, chunk / 16, n, n, bad);
        unsigned long long other;
        uint32_t word;
        CK(cudaMemcpy(&other, bad, 8, cudaMemcpyDeviceToHost));
        CK(cudaMemcpy(&word, status, 4, cudaMemcpyDeviceToHost));
        wrong += other + word;
        double t = median_ms(reps, run);
        printf("    %-16s %u of %u warps a chunk  %s  %7.1f GB/s out (%.3f ms)\n", name, split, segs, other || word ? "WRONG" : "exact", total / t / 1e6, t);
    };
    if (tr == OW_BF16) row("list", segs, [&] {
        ow_x16_bf16<<<(uint32_t)((list.size() + OW_X16_WARPS - 1) / OW_X16_WARPS), 32 * OW_X16_WARPS, OW_X16_SHARED>>>(dchunks, dlist, list.size(), status);
    });
    for (uint32_t split = 1; split <= segs; split *= 2) {
        ow_stream_few few = {{1, n, split, 0, 0, 0}, {{(uint64_t)stream, bytes, (uint64_t)out, total, chunk, 0, n, OW_STREAM_NATIVE, OW_STREAM_X16, 0, 0}}};
        const char* names[] = {"stream", "  5 blocks an SM", "  6 blocks an SM"};
        int i = 0;
        for (auto k : {ow_stream_x16, lab_stream_5, lab_stream_6}) {
            row(names[i++], split, [&] { k<<<(n * split + OW_X16_WARPS - 1) / OW_X16_WARPS, 32 * OW_X16_WARPS, OW_STREAM_SHARED>>>(nullptr, nullptr, n * split, status, few); });
        }
    }
    fflush(stdout);
    for (void* p : {(void*)in, (void*)stream, (void*)out, (void*)d, (void*)bad, (void*)dchunks, (void*)dlist, (void*)status}) CK(cudaFree(p));
    return wrong || refused;
}

}  // namespace

int main(int argc, char** argv) {
    uint32_t mib = 1024;
    int reps = 7, bad = 0;
    bool only_check = false;
    std::string only;
    for (int i = 1; i < argc; i++) {
        std::string a = argv[i];
        auto text = [&] { return i + 1 < argc ? argv[++i] : (char*)""; };
        if (a == "--check") only_check = true;
        else if (a == "--mib") mib = atoi(text());
        else if (a == "--reps") reps = atoi(text());
        else if (a == "--only") only = text();
        else if (a == "--nvcomp") {
            nvcomp = dlopen(text(), RTLD_NOW | RTLD_LOCAL);
            if (!nvcomp) fprintf(stderr, "%s\n", dlerror());
        } else return fprintf(stderr, "what is %s?\n", a.c_str()), 2;
    }
    auto wanted = [&](const char* s) { return only.empty() || only == s; };
    cudaDeviceProp dev;
    CK(cudaGetDeviceProperties(&dev, 0));
    printf("%s, %d SMs\n", dev.name, dev.multiProcessorCount);
    if (wanted("lz4")) bad += check_lz("lz4", ow_lz4_decode, ow_lz4_decode_host, lz4);
    if (wanted("snappy")) bad += check_lz("snappy", ow_snappy_decode, ow_snappy_decode_host, snappy);
    if (wanted("cascaded")) bad += check_lz("cascaded", ow_cascaded_decode, ow_cascaded_decode_host, cascaded);
    if (wanted("x16")) bad += check_x16();
    if (!only_check) {
        if (only != "x16") bad += time_lz(only, mib, reps);
        if (wanted("x16")) {
            for (uint32_t chunk : {64u << 10, 256u << 10, 1u << 20, 4u << 20}) bad += time_x16(OW_BF16, chunk, mib, reps);
            for (int tr = OW_FP16; tr <= OW_BYTES; tr++) bad += time_x16(tr, 1 << 20, mib, reps);
        }
    }
    printf("%s\n", bad ? "FAILED" : "all exact");
    return bad ? 1 : 0;
}
