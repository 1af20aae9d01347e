// The lab on a GPU: verify every kernel, then time it.
//
//   x16_lab [--check] [--only N] [--mib OUT] [--tiles S] [--reps R] [--fuzz N] [--one]
//
// --check: correctness and corrupt chunks only. --one: one launch of --only at
// --tiles, for a profiler. Without options: everything, in about a minute.
#include <atomic>
#include <cinttypes>

#define CK(call)                                                                                        \
    do {                                                                                                \
        cudaError_t e_ = (call);                                                                        \
        if (e_ != cudaSuccess) {                                                                        \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_));      \
            exit(2);                                                                                    \
        }                                                                                               \
    } while (0)

namespace lab {

typedef void (*Kernel)(const ow_x16_chunk*, const ow_x16_seg*, u32, u32*);

template <class V, int TR, int WARPS, int BLOCKS>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    lab_kernel(const ow_x16_chunk* chunks, const ow_x16_seg* segs, u32 n, u32* status) {
    extern __shared__ __align__(1024) u32 shared[];
    typedef typename V::Cfg Cfg;
    u32 warp = threadIdx.x / 32, job = blockIdx.x * WARPS + warp, phase = 0;
    X16Place place = x16_place<Cfg>((u32)__cvta_generic_to_shared(shared), warp, WARPS);
    if (place.table % 1024) __trap();  // the bit-select addresses count on it
    if (job >= n) return;
    if (Cfg::kBulk) {
        if (lane() == 0) bulk_init(place.bar);
        syncwarp();
    }
    do {
        V::template run<TR>(chunks, segs, job, status, place, phase);
        job += gridDim.x * WARPS;
    } while (V::kPersistent && job < n);
}

struct Entry {
    Kernel kernel;
    int warps, shared;
    bool persistent;
    int grid;  // blocks that fit the chip, for persistent kernels
};

// Every transform of the variants that take all, bf16 of the others.
inline Entry entry(int id, int tr) {
    switch (100 * id + tr) {
#define AS_ENTRY(id, body, all, warps, blocks, text) \
    case 100 * id + OW_BF16: return {lab_kernel<body, OW_BF16, warps, blocks>, warps, warps * (int)kX16Shared<body::Cfg>, body::kPersistent, 0};
        OW_LAB_VARIANTS(AS_ENTRY)
#define AS_BEST(t) \
    case 400 + t: return {lab_kernel<Body<X16Best>, t, 8, 6>, 8, 8 * (int)kX16Shared<X16Best>, false, 0};
        AS_BEST(OW_FP16) AS_BEST(OW_FP32) AS_BEST(OW_E4M3) AS_BEST(OW_E5M2) AS_BEST(OW_INT8)
        AS_BEST(OW_NIBBLES) AS_BEST(OW_BYTES)
    }
    return {nullptr, 0, 0, false, 0};
}

inline Entry prepare(int id, int tr) {
    Entry e = entry(id, tr);
    if (!e.kernel) return e;
    CK(cudaFuncSetAttribute(e.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, e.shared));
    int sms;
    CK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    CK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&e.grid, e.kernel, 32 * e.warps, e.shared));
    e.grid *= sms;
    return e;
}

inline void launch(const Entry& e, const ow_x16_chunk* c, const ow_x16_seg* s, u32 n, u32* status, cudaStream_t st = 0) {
    u32 blocks = (n + e.warps - 1) / e.warps;
    if (e.persistent) blocks = std::min(blocks, (u32)e.grid);
    e.kernel<<<blocks, 32 * e.warps, e.shared, st>>>(c, s, n, status);
    CK(cudaGetLastError());
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

// The memory floor: what a decoder must read (0.664 of the output) and write.
__global__ void floor_kernel(const uint4* in, uint4* out, u32 pieces) {
    u32 l = threadIdx.x & 31, warps = gridDim.x * blockDim.x / 32;
    for (u32 p = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; p < pieces; p += warps) {
        const uint4* a = in + (size_t)p * 2720;  // 43520 of 65536 bytes
        uint4* b = out + (size_t)p * 4096;
#pragma unroll 8
        for (u32 i = 0; i < 128; i++) {
            uint4 v = make_uint4(i, l, p, 7);
            u32 at = 21 * i + (i + 3) / 4;
            if (l < 21 + (i % 4 == 0)) v = __ldcs(a + at + l);
            __stcs(b + 32 * i + l, v);
        }
    }
}

// Counts 16-byte units that differ from the reference of their chunk.
__global__ void compare_kernel(const uint4* out, const uint4* ref, u32 units, u32 chunks, u32 unique, unsigned long long* bad) {
    unsigned long long n = 0, total = (unsigned long long)units * chunks;
    for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; i < total; i += (unsigned long long)gridDim.x * blockDim.x) {
        uint4 a = out[i], b = ref[i / units % unique * units + i % units];
        n += a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w;
    }
    if (n) atomicAdd(bad, n);
}

// check_cases runs one variant on a batch of cases of one transform.
inline int check_cases(int id, const std::vector<const Case*>& cases) {
    constexpr size_t kGuard = 1024;
    Entry e = prepare(id, cases[0]->tr);
    if (!e.kernel) return 0;
    size_t in = 0, out = kGuard;
    for (const Case* c : cases) in += (c->stored.size() + 255) / 256 * 256 + 256, out += (c->plain.size() + 255) / 256 * 256 + kGuard;
    Bytes src(in, 0x5a), back(out);
    u8 *dsrc = device<u8>(in), *ddst = device<u8>(out);
    std::vector<ow_x16_chunk> chunks;
    std::vector<ow_x16_seg> jobs;
    size_t i = 0, o = kGuard;
    std::vector<size_t> at;
    for (const Case* c : cases) {
        memcpy(&src[i], c->stored.data(), c->stored.size());
        chunks.push_back({(u64)(uintptr_t)(dsrc + i), (u64)(uintptr_t)(ddst + o), (u32)c->stored.size(), (u32)c->plain.size(),
                          (uint16_t)c->seg_tiles, 0, (u32)chunks.size()});
        for (u32 s = 0; s < jobs_of(c->tr, c->plain.size(), c->seg_tiles); s++) jobs.push_back({(u32)chunks.size() - 1, s});
        at.push_back(o);
        i += (c->stored.size() + 255) / 256 * 256 + 256;
        o += (c->plain.size() + 255) / 256 * 256 + kGuard;
    }
    CK(cudaMemcpy(dsrc, src.data(), in, cudaMemcpyHostToDevice));
    CK(cudaMemset(ddst, 0xa5, out));
    ow_x16_chunk* dc = upload(chunks);
    ow_x16_seg* dj = upload(jobs);
    std::vector<u32> status(cases.size(), 0);
    u32* ds = upload(status);
    launch(e, dc, dj, jobs.size(), ds);
    CK(cudaDeviceSynchronize());
    CK(cudaMemcpy(status.data(), ds, 4 * status.size(), cudaMemcpyDeviceToHost));
    CK(cudaMemcpy(back.data(), ddst, out, cudaMemcpyDeviceToHost));
    int bad = 0;
    for (size_t k = 0, from = 0; k < cases.size(); k++) {
        const Case& c = *cases[k];
        bool guard = true;
        size_t end = at[k] + c.plain.size(), to = k + 1 < cases.size() ? at[k + 1] : out;
        for (size_t j = from; j < at[k]; j++) guard &= back[j] == 0xa5;
        for (size_t j = end; j < to; j++) guard &= back[j] == 0xa5;
        from = end;
        bool same = memcmp(&back[at[k]], c.plain.data(), c.plain.size()) == 0;
        if (c.good != (status[k] == 0) || (c.good && !same) || !guard) {
            if (bad++ < 5) printf("FAIL kernel %d, %s: status %u (reference %s), bytes %s, guards %s\n", id, c.name.c_str(), status[k],
                                  c.good ? "accepts" : "refuses", same ? "same" : "differ", guard ? "good" : "BROKEN");
        }
    }
    for (void* p : {(void*)dsrc, (void*)ddst, (void*)dc, (void*)dj, (void*)ds}) CK(cudaFree(p));
    return bad;
}

inline int check_all(int only, int fuzz) {
    int bad = 0, runs = 0, accepted = 0;
    std::vector<Case> good = good_cases(), corrupt;
    std::mt19937_64 rng(1);
    for (int i = 0; i < fuzz; i++) corrupt.push_back(corrupt_case(rng)), accepted += corrupt.back().good;
    for (const Variant& v : kVariants) {
        if (only && v.id != only) continue;
        for (int tr = OW_BF16; tr <= OW_BYTES; tr++) {
            std::vector<const Case*> a, b;
            for (const Case& c : good) if (c.tr == tr && takes(v, c)) a.push_back(&c);
            for (const Case& c : corrupt) if (c.tr == tr && v.all) b.push_back(&c);
            if (!entry(v.id, tr).kernel) continue;
            if (!b.empty()) bad += check_cases(v.id, b), runs += b.size();
            // After the corrupt ones: the context must still give good bytes.
            if (!a.empty()) bad += check_cases(v.id, a), runs += a.size();
        }
    }
    printf("correctness: %d runs, %d failures (%d corrupt chunks, seed 1, %d of them still valid)\n", runs, bad, fuzz, accepted);
    return bad;
}

// `mib` chunks of 1 MiB of one transform in device memory, made from a few
// different ones.
struct Field {
    int tr;
    u32 tiles, mib, unique, per_chunk;
    double ratio;
    u8 *src, *dst, *ref;
    ow_x16_chunk* chunks;
    ow_x16_seg* jobs;
    u32* status;
    unsigned long long* bad;

    Field(int tr, u32 tiles, u32 mib) : tr(tr), tiles(tiles), mib(mib), unique(std::min(mib, 32u)) {
        std::vector<Bytes> plain(unique), stored(unique);
        std::atomic<u32> next{0};
        std::vector<std::thread> pool;
        for (u32 w = 0; w < std::max(1u, std::thread::hardware_concurrency()); w++) {
            pool.emplace_back([&] {
                for (u32 i; (i = next++) < unique;) {
                    plain[i] = weights(tr, 1 << 20, 1000 + i);
                    stored[i] = encode(tr, plain[i].data(), 1 << 20, tiles);
                }
            });
        }
        for (auto& t : pool) t.join();
        std::vector<size_t> at(mib);
        size_t total = 0, sum = 0;
        for (u32 i = 0; i < mib; i++) {
            at[i] = total;
            total += (stored[i % unique].size() + 15) / 16 * 16;
            sum += stored[i % unique].size();
        }
        ratio = (double)sum / mib / (1 << 20);
        src = device<u8>(total);
        dst = device<u8>((size_t)mib << 20);
        ref = device<u8>((size_t)unique << 20);
        status = device<u32>(mib);
        bad = device<unsigned long long>(1);
        std::vector<ow_x16_chunk> c;
        std::vector<ow_x16_seg> j;
        per_chunk = jobs_of(tr, 1 << 20, tiles);
        for (u32 i = 0; i < mib; i++) {
            const Bytes& s = stored[i % unique];
            if (i < unique) {
                CK(cudaMemcpy(src + at[i], s.data(), s.size(), cudaMemcpyHostToDevice));
                CK(cudaMemcpy(ref + ((size_t)i << 20), plain[i].data(), 1 << 20, cudaMemcpyHostToDevice));
            } else {
                CK(cudaMemcpyAsync(src + at[i], src + at[i % unique], s.size(), cudaMemcpyDeviceToDevice));
            }
            c.push_back({(u64)(uintptr_t)(src + at[i]), (u64)(uintptr_t)(dst + ((size_t)i << 20)), (u32)s.size(), 1 << 20, (uint16_t)tiles, 0, i});
            for (u32 k = 0; k < per_chunk; k++) j.push_back({i, k});
        }
        chunks = upload(c);
        jobs = upload(j);
        CK(cudaDeviceSynchronize());
    }
    ~Field() {
        for (void* p : {(void*)src, (void*)dst, (void*)ref, (void*)chunks, (void*)jobs, (void*)status, (void*)bad}) cudaFree(p);
    }
    void run(const Entry& e, u32 first, u32 count) { launch(e, chunks, jobs + (size_t)first * per_chunk, count * per_chunk, status); }
    // verify poisons the output, decodes everything once, and compares.
    bool verify(const Entry& e) {
        CK(cudaMemset(dst, 0xa5, (size_t)mib << 20));
        CK(cudaMemset(status, 0, 4 * mib));
        CK(cudaMemset(bad, 0, 8));
        run(e, 0, mib);
        compare_kernel<<<1024, 256>>>((uint4*)dst, (uint4*)ref, 65536, mib, unique, bad);
        CK(cudaDeviceSynchronize());
        unsigned long long n;
        std::vector<u32> st(mib);
        CK(cudaMemcpy(&n, bad, 8, cudaMemcpyDeviceToHost));
        CK(cudaMemcpy(st.data(), status, 4 * mib, cudaMemcpyDeviceToHost));
        for (u32 s : st) n += s != 0;
        return n == 0;
    }
};

template <class F> double median_ms(int reps, F f) {
    cudaEvent_t a, b;
    CK(cudaEventCreate(&a));
    CK(cudaEventCreate(&b));
    std::vector<float> t;
    for (int i = 0; i < reps + 1; i++) {
        CK(cudaEventRecord(a));
        f(i);
        CK(cudaEventRecord(b));
        CK(cudaEventSynchronize(b));
        float ms;
        CK(cudaEventElapsedTime(&ms, a, b));
        if (i) t.push_back(ms);  // the first warms up
    }
    CK(cudaEventDestroy(a));
    CK(cudaEventDestroy(b));
    std::sort(t.begin(), t.end());
    return t[t.size() / 2];
}

// row verifies and times one kernel on a field and prints its line.
inline bool row(Field& f, int id, const char* text, int reps) {
    Entry e = prepare(id, f.tr);
    if (!e.kernel) return true;
    bool good = f.verify(e);
    double all = median_ms(reps, [&](int) { f.run(e, 0, f.mib); });
    u32 piece = std::min(64u, f.mib), pieces = f.mib / piece;
    double one = median_ms(2 * (int)pieces, [&](int i) { f.run(e, i % pieces * piece, piece); });
    cudaFuncAttributes at;
    CK(cudaFuncGetAttributes(&at, e.kernel));
    int blocks;
    CK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, e.kernel, 32 * e.warps, e.shared));
    double mib = 1048576;
    printf("%2d %-8s S%-3u %s %6.3f TB/s %6.2f us/64MiB %6.3f TB/s  %2d regs %3zu stack %2d warps  %s\n", id, layout(f.tr).name,
           f.tiles, good ? "exact" : "WRONG", f.mib * mib / all / 1e9, one * 1e3, piece * mib / one / 1e9, at.numRegs,
           at.localSizeBytes, blocks * e.warps, text);
    fflush(stdout);
    return good;
}

inline void floors(Field& f, int reps) {
    u32 pieces = f.mib * 16;
    size_t in_bytes = (size_t)pieces * 43520;
    u8* in = device<u8>(in_bytes);
    // Weights, not zeros: those copy faster.
    f.run(prepare(4, f.tr), 0, f.mib);
    CK(cudaMemcpyAsync(in, f.dst, in_bytes, cudaMemcpyDeviceToDevice));
    u8* copy = device<u8>((size_t)f.mib << 20);
    for (int blocks : {132 * 4, 132 * 8, 132 * 16}) {
        double ms = median_ms(reps, [&](int) { floor_kernel<<<blocks, 256>>>((uint4*)in, (uint4*)f.dst, pieces); });
        CK(cudaGetLastError());
        printf("floor: read 0.664, write 1.0, %4d blocks: %.3f TB/s of output\n", blocks, f.mib * 1048576.0 / ms / 1e9);
    }
    double ms = median_ms(reps, [&](int) { CK(cudaMemcpyAsync(copy, f.dst, (size_t)f.mib << 20, cudaMemcpyDeviceToDevice)); });
    printf("floor: cudaMemcpy device to device: %.3f TB/s read + write\n", 2 * f.mib * 1048576.0 / ms / 1e9);
    ms = median_ms(reps, [&](int) { CK(cudaMemsetAsync(copy, 0, (size_t)f.mib << 20)); });
    printf("floor: cudaMemset: %.3f TB/s written\n", f.mib * 1048576.0 / ms / 1e9);
    CK(cudaFree(in));
    CK(cudaFree(copy));
}

}  // namespace lab

int main(int argc, char** argv) {
    using namespace lab;
    int only = 0, reps = 9, fuzz = 4000;
    u32 mib = 3072, tiles = 128;
    bool check = false, one = false;
    for (int i = 1; i < argc; i++) {
        std::string a = argv[i];
        auto num = [&] { return i + 1 < argc ? atoi(argv[++i]) : 0; };
        if (a == "--check") check = true;
        else if (a == "--one") one = true;
        else if (a == "--only") only = num();
        else if (a == "--mib") mib = num();
        else if (a == "--tiles") tiles = num();
        else if (a == "--reps") reps = num();
        else if (a == "--fuzz") fuzz = num();
        else return fprintf(stderr, "what is %s?\n", a.c_str()), 2;
    }
    cudaDeviceProp dev;
    CK(cudaGetDeviceProperties(&dev, 0));
    if (one) {
        Field f(OW_BF16, tiles, mib);
        Entry e = prepare(only ? only : 4, OW_BF16);
        for (int i = 0; i < 3; i++) f.run(e, 0, mib);
        CK(cudaDeviceSynchronize());
        printf("ran kernel %d\n", only ? only : 4);
        return 0;
    }
    printf("%s, %d SMs, %zu KiB shared an SM\n", dev.name, dev.multiProcessorCount, dev.sharedMemPerMultiprocessor >> 10);
    int bad = check_all(only, fuzz);
    if (check) return bad ? 1 : 0;
    {
        Field f(OW_BF16, tiles, mib);
        printf("bf16 Gaussian, %u MiB of output, ratio %.4f\n", mib, f.ratio);
        floors(f, reps);
        for (const Variant& v : kVariants) {
            if (!only || v.id == only) bad += !row(f, v.id, v.text, reps);
        }
        // Again, to see the spread of the same kernel.
        if (!only) bad += !row(f, 4, "again", reps);
    }
    if (!only) {
        for (u32 s : {32u, 64u, 256u}) {
            Field f(OW_BF16, s, mib);
            char text[40];
            snprintf(text, sizeof text, "ratio %.4f", f.ratio);
            for (int id : {4, 6}) bad += !row(f, id, text, reps);
        }
        for (int tr = OW_FP16; tr <= OW_BYTES; tr++) {
            Field f(tr, tiles, std::min(mib, 1024u));
            char text[40];
            snprintf(text, sizeof text, "ratio %.4f", f.ratio);
            bad += !row(f, 4, text, reps);
        }
    }
    printf("%s\n", bad ? "FAILED" : "all exact");
    return bad ? 1 : 0;
}
