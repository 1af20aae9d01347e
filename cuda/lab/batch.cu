// The batch kernels on a GPU: held to their host twins, then timed.
//
//   g++ -std=c++17 -O2 -c ../batch_host.cc ../stream_host.cc
//   nvcc -std=c++17 -O3 -arch=native batch.cu batch_host.o stream_host.o -o batch -lpthread -ldl
//   batch [--check] [--mib OUT] [--reps R] [--only lz4|snappy|cascaded|x16] [--nvcomp libnvcomp.so.5]
//
// --check: no times. --nvcomp: its decoders beside ours, on the same blocks.
#include <dlfcn.h>

#include <string>

#include "../batch.cu"
#include "../stream.cu"
#include "batch_content.h"
#include "lab_gpu.cuh"

extern "C" {
void ow_lz4_decode_host(ow_batch_item*, uint32_t);
void ow_snappy_decode_host(ow_batch_item*, uint32_t);
void ow_cascaded_decode_host(ow_batch_item*, uint32_t);
void ow_stream_x16_host(const ow_stream_head*, uint32_t, uint32_t*);
void ow_x16_encode_host(ow_batch_item*, uint32_t);
}

namespace {

using namespace lab;

typedef void (*Kernel)(ow_batch_item*, uint32_t);

// launched is a kernel of items as check calls it.
Work launched(Kernel kernel, uint32_t per) {
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
    std::vector<ow_batch_item> items = fetch(ditems, n);
    std::vector<ow_stream> streams = raw_streams(items);
    std::vector<uint8_t> table(sizeof(ow_stream_head) + n * sizeof streams[0]);
    ow_stream_head head = {n, n, 2, 0, 0, 0};
    memcpy(table.data(), &head, sizeof head);
    memcpy(table.data() + sizeof head, streams.data(), n * sizeof streams[0]);
    uint8_t* dtable = upload(table);
    uint32_t* dstatus = upload(std::vector<uint32_t>(n));
    ow_stream_x16<<<(2 * n + OW_X16_WARPS - 1) / OW_X16_WARPS, 32 * OW_X16_WARPS, OW_STREAM_SHARED>>>((ow_stream_head*)dtable, nullptr, 2 * n, dstatus, {});
    say(items, fetch(dstatus, n).data());
    CK(cudaMemcpy(ditems, items.data(), n * sizeof items[0], cudaMemcpyHostToDevice));
    release({dtable, dstatus});
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

// What is measured of bytes: ours and nvCOMP's name, the kernel and its twin, the encoder.
struct Format { const char *name, *theirs; Kernel kernel; void (*twin)(ow_batch_item*, uint32_t); Bytes (*make)(const Bytes&); };
const Format kFormats[] = {
    {"lz4", "LZ4", ow_lz4_decode, ow_lz4_decode_host, lz4},
    {"snappy", "Snappy", ow_snappy_decode, ow_snappy_decode_host, snappy},
    {"cascaded", "Cascaded", ow_cascaded_decode, ow_cascaded_decode_host, cascaded},
};

int check_format(const Format& f) {
    std::mt19937_64 rng(1);
    std::vector<Input> in;
    std::vector<Bytes> want, outs;
    for (int i = 0; i < 3000; i++) {
        Bytes b = content(i % kKindCount, i < 40 ? i * 3 : rng() % (i % 50 ? 4000 : 70000), i);
        for (size_t k = 0; i % 5 == 0 && k + 40 < b.size(); k += 1 + rng() % 3000) b[k] ^= rng();
        if (f.make == cascaded) b.resize(b.size() / 4 * 4);
        Input p = {f.make(b), b.size() + (i % 3 == 0) * (rng() % 50), 0};
        if (i % 2) {
            for (int k = rng() % 4; k >= 0 && !p.src.empty(); k--) p.src[rng() % p.src.size()] = rng();
            if (i % 7 == 0) p.src.resize(rng() % (p.src.size() + 1));
            b.clear();
        }
        want.push_back(b);
        in.push_back(std::move(p));
    }
    int bad = check(f.name, launched(f.kernel, OW_BATCH_WARPS), f.twin, in, false, &outs);
    for (size_t i = 0; i < in.size(); i += 2) bad += outs[i] != want[i];
    if (bad) printf("FAIL %s: other content\n", f.name);
    return bad;
}

int check_x16() {
    std::vector<Input> in, back;
    std::mt19937_64 rng(2);
    for (int tr = OW_BF16; tr <= OW_BYTES; tr++) {
        for (size_t n : {(size_t)3000, (size_t)4096, (size_t)20011, (size_t)65536, (size_t)(1 << 18) + 99}) {
            for (int wild : {0, 3, 200}) in.push_back({weights(tr, n, rng(), wild), n, (uint32_t)tr});
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
            plain.push_back(weights(tr, 50000 + tr, rng(), 3));
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

// nvCOMP's batched decoders, if their library was named: facts of its headers.
struct Options { char bytes[64]; };
// Version 6 left a name's end out and added the stream.
typedef int (*Temp)(size_t, size_t, Options, size_t*, size_t, cudaStream_t);
typedef int (*Decompress)(const void* const*, const size_t*, const size_t*, size_t*, size_t, void*, size_t, void* const*, Options, int*, cudaStream_t);
void* nvcomp = nullptr;

// row verifies and times a kernel that makes the chunks of a field.
bool row(const Field& f, const char* name, const char* kind, Kernel kernel, int reps) {
    auto run = [&] { kernel<<<ow_batch_blocks(OW_BATCH_WARPS, f.n), OW_BATCH_THREADS>>>(f.ditems, f.n); };
    bool good = f.verify(run);
    double ms = median_ms(reps, run);
    cudaFuncAttributes at;
    CK(cudaFuncGetAttributes(&at, kernel));
    printf("%-18s %-7s %4u KiB  ratio %.3f  %s  %7.1f GB/s out  %8.3f ms  %d regs %zu stack\n", name, kind, f.chunk >> 10, f.ratio,
           good ? "exact" : "WRONG", f.gb_s(ms), ms, at.numRegs, at.localSizeBytes);
    fflush(stdout);
    return good;
}

// theirs does the same with the decoder of nvCOMP's.
void theirs(const Field& f, const char* name, const char* kind, int reps) {
    if (!nvcomp) return;
    std::string base = std::string("nvcompBatched") + name;
    Temp temp = (Temp)dlsym(nvcomp, (base + "DecompressGetTempSizeAsync").c_str());
    if (!temp) temp = (Temp)dlsym(nvcomp, (base + "DecompressGetTempSize").c_str());
    Decompress go = (Decompress)dlsym(nvcomp, (base + "DecompressAsync").c_str());
    if (!temp || !go) return (void)printf("nvCOMP %s: no such functions\n", name);
    Options none = {};
    std::vector<void*> in, out;
    std::vector<size_t> len, cap(f.n, f.chunk);
    for (const ow_batch_item& it : f.items) in.push_back((void*)it.src), out.push_back((void*)it.dst), len.push_back(it.src_len);
    size_t bytes = 0;
    if (int rc = temp(f.n, f.chunk, none, &bytes, (size_t)f.n * f.chunk, 0)) return (void)printf("nvCOMP %s: %d\n", name, rc);
    void **din = upload(in), **dout = upload(out);
    size_t *dlen = upload(len), *dcap = upload(cap), *dmade = device<size_t>(f.n);
    int* status = device<int>(f.n);
    uint8_t* room = device<uint8_t>(bytes);
    int rc = 0;
    auto run = [&] { rc = go(din, dlen, dcap, dmade, f.n, room, bytes, dout, none, status, 0); };
    bool good = f.verify(run);
    double ms = median_ms(reps, run);
    printf("%-18s %-7s %4u KiB  ratio %.3f  %s  %7.1f GB/s out  %8.3f ms  rc %d, %zu MiB of scratch\n", ("nvCOMP " + std::string(name)).c_str(),
           kind, f.chunk >> 10, f.ratio, good ? "exact" : "WRONG", f.gb_s(ms), ms, rc, bytes >> 20);
    fflush(stdout);
    release({din, dout, dlen, dcap, dmade, status, room});
}

int time_format(const Format& format, uint32_t mib, int reps) {
    int bad = 0;
    for (int kind = 0; kind < kKindCount; kind++) {
        uint32_t chunk = 64 << 10, unique = 256;
        std::vector<Bytes> plain(unique), stored(unique);
        parallel(unique, [&](size_t i) {
            plain[i] = content(kind, chunk, 100 + i);
            stored[i] = format.make(plain[i]);
        });
        Field f(mib * 16, chunk, plain, stored, 0);
        bad += !row(f, format.name, kKinds[kind], format.kernel, reps);
        theirs(f, format.theirs, kKinds[kind], reps);
    }
    return bad;
}

// One chunk size of one transform: encode into slots, decode what came out.
int time_x16(int tr, uint32_t chunk, uint32_t mib, int reps) {
    std::vector<Bytes> plain(std::max(1u, (8u << 20) / chunk));
    parallel(plain.size(), [&](size_t i) { plain[i] = weights(tr, chunk, 1000 + i); });
    Field f((uint32_t)(((uint64_t)mib << 20) / chunk), chunk, plain, plain, tr);
    size_t stride = chunk + 16;  // each chunk behind its block's head, as decode_x16 takes it
    uint8_t* mid = device<uint8_t>(f.n * stride);
    std::vector<ow_batch_item> items = f.items;
    for (uint32_t i = 0; i < f.n; i++) items[i].dst = (uint64_t)(mid + i * stride + 16);
    ow_batch_item* d = upload(items);
    double ms = median_ms(reps, [&] { ow_x16_encode<<<f.n, ow_x16_threads(chunk)>>>(d, f.n); });
    items = fetch(d, f.n);
    size_t sum = 0, refused = 0;
    std::vector<uint64_t> heads;
    for (uint32_t i = 0; i < f.n; i++) {
        sum += items[i].written;
        refused += items[i].status != 0;
        heads.push_back(1 | tr << 8 | (uint64_t)(items[i].arg >> 16) << 16 | (uint64_t)chunk << 32);
        items[i] = {(uint64_t)(mid + i * stride), items[i].written + 16, f.items[i].dst, chunk, 0, 0, 0};
    }
    CK(cudaMemcpy2D(mid + 8, stride, heads.data(), 8, 8, f.n, cudaMemcpyHostToDevice));
    ow_batch_item* back = upload(items);
    bool good = f.verify([&] { decode_x16(back, f.n); }) && !refused;
    for (const ow_batch_item& it : fetch(back, f.n)) good &= it.status == 0;
    printf("x16 %-8s %4u KiB  ratio %.4f  %s  encode %7.1f GB/s in (%.3f ms)\n", layout(tr).name, chunk >> 10, (double)sum / f.n / chunk,
           good ? "exact" : "WRONG", f.gb_s(ms), ms);
    fflush(stdout);
    release({mid, d, back});
    return !good;
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
    for (const Format& f : kFormats) {
        if (wanted(f.name)) bad += check_format(f);
    }
    if (wanted("x16")) bad += check_x16();
    for (const Format& f : kFormats) {
        if (wanted(f.name) && !only_check) bad += time_format(f, mib, reps);
    }
    if (wanted("x16") && !only_check) {
        for (uint32_t chunk : {64u << 10, 256u << 10, 1u << 20, 4u << 20}) bad += time_x16(OW_BF16, chunk, mib, reps);
        for (int tr = OW_FP16; tr <= OW_BYTES; tr++) bad += time_x16(tr, 1 << 20, mib, reps);
    }
    printf("%s\n", bad ? "FAILED" : "all exact");
    return bad ? 1 : 0;
}
