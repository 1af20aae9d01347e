// The X16 lab on a GPU: verify every kernel, then time it.
//
//   x16_lab [--check] [--only N] [--mib OUT] [--tiles S] [--reps R] [--fuzz N]
//
// --check: correctness and corrupt chunks only. Without options: everything, in
// about a minute.
#include "lab_gpu.cuh"

namespace lab {

template <class C, int TR>
__global__ void __launch_bounds__(32 * OW_X16_WARPS, 6)
    lab_kernel(const ow_x16_chunk* chunks, const ow_x16_seg* segs, u32 n, u32* status) {
    extern __shared__ __align__(1024) u32 shared[];
    u32 warp = threadIdx.x / 32, job = blockIdx.x * OW_X16_WARPS + warp, phase = 0;
    X16Place place = x16_place<C>((u32)__cvta_generic_to_shared(shared), warp, OW_X16_WARPS);
    if (place.table % 1024) __trap();  // the bit-select addresses count on it
    if (job >= n) return;
    if (C::kBulk) {
        if (lane() == 0) bulk_init(place.bar);
        syncwarp();
    }
    x16_job<TR, C>(chunks, segs, job, status, place, phase);
}

struct Kernel {
    void (*entry)(const ow_x16_chunk*, const ow_x16_seg*, u32, u32*);
    u32 shared;
};

// Every transform of the first variant, bf16 of the others.
inline Kernel kernel_of(int id, int tr) {
    switch (100 * id + tr) {
#define AS_BF16(id, cfg, all, text) \
    case 100 * id + OW_BF16: return {lab_kernel<cfg, OW_BF16>, OW_X16_WARPS * kX16Shared<cfg>};
        OW_LAB_VARIANTS(AS_BF16)
#define AS_BEST(t) \
    case 100 + t: return {lab_kernel<X16Best, t>, OW_X16_SHARED};
        AS_BEST(OW_FP16) AS_BEST(OW_FP32) AS_BEST(OW_E4M3) AS_BEST(OW_E5M2) AS_BEST(OW_INT8)
        AS_BEST(OW_NIBBLES) AS_BEST(OW_BYTES)
    }
    return {nullptr, 0};
}

// The jobs of some chunks, whose arg is the transform and the tiles of a segment << 16.
struct Jobs {
    u32 n;
    ow_x16_chunk* chunks;
    ow_x16_seg* segs;
    u32* status;  // a word for each chunk

    explicit Jobs(const std::vector<ow_batch_item>& items) {
        std::vector<ow_x16_chunk> c;
        std::vector<ow_x16_seg> s;
        for (u32 i = 0; i < items.size(); i++) {
            const ow_batch_item& it = items[i];
            c.push_back({it.src, it.dst, (u32)it.src_len, (u32)it.dst_cap, (uint16_t)(it.arg >> 16), 0, i});
            for (u32 k = 0; k < jobs_of(it.arg & 255, it.dst_cap, it.arg >> 16); k++) s.push_back({i, k});
        }
        n = s.size();
        chunks = upload(c);
        segs = upload(s);
        status = upload(std::vector<u32>(c.size()));
    }
    ~Jobs() { release({chunks, segs, status}); }
    void run(const Kernel& k) const { k.entry<<<(n + OW_X16_WARPS - 1) / OW_X16_WARPS, 32 * OW_X16_WARPS, k.shared>>>(chunks, segs, n, status); }
};

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

// The reference decoder as the twin of a kernel: its only status is 1.
inline void reference(ow_batch_item* it, u32) {
    const u8* src = (const u8*)it->src;
    it->status = !reference_decode(it->arg & 255, Bytes(src, src + it->src_len), (u8*)it->dst, it->dst_cap, it->arg >> 16);
    it->written = it->status ? 0 : it->dst_cap;
}

inline Work decoded_by(Kernel k) {
    return [k](ow_batch_item* ditems, u32 n) {
        std::vector<ow_batch_item> items = fetch(ditems, n);
        Jobs jobs(items);
        jobs.run(k);
        std::vector<u32> status = fetch(jobs.status, n);
        for (u32 i = 0; i < n; i++) items[i].status = status[i] != 0, items[i].written = status[i] ? 0 : items[i].dst_cap;
        CK(cudaMemcpy(ditems, items.data(), n * sizeof items[0], cudaMemcpyHostToDevice));
    };
}

inline int check_all(int only, int fuzz) {
    int bad = 0;
    std::vector<Case> cases;
    std::mt19937_64 rng(1);
    for (int i = 0; i < fuzz; i++) cases.push_back(corrupt_case(rng));
    for (Case& c : good_cases()) cases.push_back(std::move(c));
    for (const Variant& v : kVariants) {
        for (int tr = OW_BF16; tr <= OW_BYTES; tr++) {
            Kernel k = kernel_of(v.id, tr);
            if (!k.entry || (only && v.id != only)) continue;
            std::vector<Input> in;
            for (const Case& c : cases) {
                if (c.tr == tr) in.push_back({c.stored, c.plain.size(), tr | c.seg_tiles << 16});
            }
            bad += check(("kernel " + std::to_string(v.id) + " " + layout(tr).name).c_str(), decoded_by(k), reference, in, true);
        }
    }
    return bad;
}

// `mib` chunks of 1 MiB of one transform.
inline Field field_of(int tr, u32 tiles, u32 mib) {
    std::vector<Bytes> plain(std::min(mib, 32u)), stored(plain.size());
    parallel(plain.size(), [&](size_t i) {
        plain[i] = weights(tr, 1 << 20, 1000 + i);
        stored[i] = encode(tr, plain[i].data(), 1 << 20, tiles);
    });
    return Field(mib, 1 << 20, plain, stored, tr | tiles << 16);
}

// row verifies and times one kernel on a field and prints its line.
inline bool row(const Field& f, int id, int tr, const char* text, int reps) {
    Kernel k = kernel_of(id, tr);
    Jobs jobs(f.items);
    auto run = [&] { jobs.run(k); };
    bool good = f.verify(run);
    for (u32 s : fetch(jobs.status, f.n)) good &= s == 0;
    double ms = median_ms(reps, run);
    cudaFuncAttributes at;
    CK(cudaFuncGetAttributes(&at, k.entry));
    printf("%2d %-8s ratio %.4f  %s  %6.3f TB/s  %2d regs %3zu stack  %s\n", id, layout(tr).name, f.ratio, good ? "exact" : "WRONG",
           f.gb_s(ms) / 1e3, at.numRegs, at.localSizeBytes, text);
    fflush(stdout);
    return good;
}

// Times the floor on a field whose output was decoded: weights, not zeros, which copy faster.
inline void floors(const Field& f, int reps) {
    u32 pieces = f.n * 16;
    uint8_t* in = device<uint8_t>((size_t)pieces * 43520);
    CK(cudaMemcpyAsync(in, f.dst, (size_t)pieces * 43520, cudaMemcpyDeviceToDevice));
    for (int blocks : {132 * 4, 132 * 8, 132 * 16}) {
        double ms = median_ms(reps, [&] { floor_kernel<<<blocks, 256>>>((uint4*)in, (uint4*)f.dst, pieces); });
        printf("floor: read 0.664, write 1.0, %4d blocks: %.3f TB/s of output\n", blocks, f.gb_s(ms) / 1e3);
    }
    release({in});
}

}  // namespace lab

int main(int argc, char** argv) {
    using namespace lab;
    int only = 0, reps = 9, fuzz = 4000;
    u32 mib = 3072, tiles = 128;
    bool only_check = false;
    for (int i = 1; i < argc; i++) {
        std::string a = argv[i];
        auto num = [&] { return i + 1 < argc ? atoi(argv[++i]) : 0; };
        if (a == "--check") only_check = true;
        else if (a == "--only") only = num();
        else if (a == "--mib") mib = num();
        else if (a == "--tiles") tiles = num();
        else if (a == "--reps") reps = num();
        else if (a == "--fuzz") fuzz = num();
        else return fprintf(stderr, "what is %s?\n", a.c_str()), 2;
    }
    cudaDeviceProp dev;
    CK(cudaGetDeviceProperties(&dev, 0));
    printf("%s, %d SMs, %zu KiB shared an SM\n", dev.name, dev.multiProcessorCount, dev.sharedMemPerMultiprocessor >> 10);
    int bad = check_all(only, fuzz);
    if (!only_check) {
        Field f = field_of(OW_BF16, tiles, mib);
        for (const Variant& v : kVariants) {
            if (!only || v.id == only) bad += !row(f, v.id, OW_BF16, v.text, reps);
        }
        floors(f, reps);
    }
    for (int tr = OW_FP16; tr <= OW_BYTES && !only && !only_check; tr++) {
        Field f = field_of(tr, tiles, std::min(mib, 1024u));
        bad += !row(f, 1, tr, "", reps);
    }
    printf("%s\n", bad ? "FAILED" : "all exact");
    return bad ? 1 : 0;
}
