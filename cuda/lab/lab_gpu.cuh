// What the labs do on a GPU: memory there, kernels beside their host twins, times.
#ifndef OVERWIRE_LAB_GPU_CUH
#define OVERWIRE_LAB_GPU_CUH

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <thread>
#include <vector>

#include "../abi_batch.h"
#include "x16_encode.h"

#define CK(call)                                                                                   \
    do {                                                                                           \
        cudaError_t e_ = (call);                                                                   \
        if (e_ != cudaSuccess) {                                                                   \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); \
            exit(2);                                                                               \
        }                                                                                          \
    } while (0)

namespace lab {

template <class F> void parallel(size_t n, F f) {
    std::atomic<size_t> next{0};
    std::vector<std::thread> pool;
    for (unsigned w = 0; w < std::max(1u, std::thread::hardware_concurrency()); w++) {
        pool.emplace_back([&] { for (size_t i; (i = next++) < n;) f(i); });
    }
    for (auto& t : pool) t.join();
}

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
// n values that a kernel has written.
template <class T> std::vector<T> fetch(const T* p, size_t n) {
    std::vector<T> v(n);
    CK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
}
inline void release(std::initializer_list<void*> all) {
    for (void* p : all) CK(cudaFree(p));
}

typedef std::function<void(ow_batch_item*, uint32_t)> Work;  // n items, in memory of the device or of the host
struct Input { Bytes src; size_t cap; uint32_t arg; };

// check runs inputs through a kernel and its host twin, guard zones between all
// outputs, sources at any alignment (or multiples of 16). The same statuses,
// lengths and bytes are asked for; what came out is left in `outs`.
inline int check(const char* name, Work kernel, Work twin, const std::vector<Input>& in, bool aligned,
                 std::vector<Bytes>* outs = nullptr, std::vector<uint32_t>* args = nullptr) {
    constexpr size_t kGuard = 64;
    std::vector<size_t> from, to;
    size_t a = 0, b = kGuard;
    for (size_t i = 0; i < in.size(); i++) {
        if (aligned) a = (a + 15) / 16 * 16, b = (b + 15) / 16 * 16;
        from.push_back(a), to.push_back(b);
        a += in[i].src.size() + (aligned ? 0 : i % 7);
        b += in[i].cap + kGuard + (aligned ? 0 : i % 5);
    }
    Bytes src(a + 16), dst(b, 0xa5);
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
    items = fetch(ditems, items.size());
    Bytes got = fetch(ddst, b);
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
    release({dsrc, ddst, ditems});
    free(hsrc), free(hdst);
    printf("check %-18s %5zu items, %4d refused, %d failures\n", name, in.size(), refused, bad);
    fflush(stdout);
    return bad;
}

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

__global__ void compare_kernel(const uint4* out, const uint4* ref, uint32_t units, uint32_t n, uint32_t unique, unsigned long long* bad) {
    unsigned long long c = 0, total = (unsigned long long)units * n;
    for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; i < total; i += (unsigned long long)gridDim.x * blockDim.x) {
        uint4 a = out[i], b = ref[i / units % unique * units + i % units];
        c += a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w;
    }
    if (c) atomicAdd(bad, c);
}

// equal says whether n chunks on the device are those that they were made of.
inline bool equal(const uint8_t* out, const uint8_t* ref, uint32_t chunk, uint32_t n, uint32_t unique) {
    unsigned long long* bad = upload(std::vector<unsigned long long>(1));
    compare_kernel<<<1024, 256>>>((const uint4*)out, (const uint4*)ref, chunk / 16, n, unique, bad);
    bool same = fetch(bad, 1)[0] == 0;
    release({bad});
    return same;
}

// A Field is `n` chunks of `chunk` bytes in device memory, made of a few.
struct Field {
    uint32_t n, chunk, unique;
    double ratio = 0;
    uint8_t *src, *dst, *ref;
    std::vector<ow_batch_item> items;
    ow_batch_item* ditems;

    // plain: what comes out; stored: what goes in, one of each unique chunk.
    Field(uint32_t n, uint32_t chunk, const std::vector<Bytes>& plain, const std::vector<Bytes>& stored, uint32_t arg)
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
        for (uint32_t i = 0; i < n; i++) {
            const Bytes& s = stored[i % unique];
            if (i < unique) {
                CK(cudaMemcpy(src + at[i], s.data(), s.size(), cudaMemcpyHostToDevice));
                CK(cudaMemcpy(ref + (size_t)i * chunk, plain[i].data(), plain[i].size(), cudaMemcpyHostToDevice));
            } else {
                CK(cudaMemcpyAsync(src + at[i], src + at[i % unique], s.size(), cudaMemcpyDeviceToDevice));
            }
            items.push_back({(uint64_t)(src + at[i]), s.size(), (uint64_t)(dst + (size_t)i * chunk), chunk, 0, 0, arg});
        }
        ditems = upload(items);
        CK(cudaDeviceSynchronize());
    }
    ~Field() { release({src, dst, ref, ditems}); }
    // verify poisons the output, lets `run` make it, and compares.
    bool verify(std::function<void()> run) const {
        CK(cudaMemset(dst, 0xa5, (size_t)n * chunk));
        run();
        CK(cudaGetLastError());
        return equal(dst, ref, chunk, n, unique);
    }
    double gb_s(double ms) const { return (double)n * chunk / ms / 1e6; }
};

}  // namespace lab
#endif
