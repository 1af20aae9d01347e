// The X16 lab without a GPU: correctness of every kernel text by the host warp.
namespace lab {

constexpr size_t kGuard = 4096;

template <class C> void run_all(int tr, const ow_x16_chunk* c, const std::vector<ow_x16_seg>& jobs, u32* status, bool falling) {
    for (u32 j = 0; j < jobs.size(); j++) {
        run_warp([&] {
            X16Place place = x16_place<C>(0, j % 8, 8);
            u32 phase = 0;
            bulk_init(place.bar);
            switch (tr) {
#define AS_CASE(t) case t: x16_job<t, C>(c, jobs.data(), j, status, place, phase); break;
                AS_CASE(OW_BF16) AS_CASE(OW_FP16) AS_CASE(OW_FP32) AS_CASE(OW_E4M3)
                AS_CASE(OW_E5M2) AS_CASE(OW_INT8) AS_CASE(OW_NIBBLES) AS_CASE(OW_BYTES)
            }
        }, falling);
    }
}

inline void run_variant(int id, int tr, const ow_x16_chunk* c, const std::vector<ow_x16_seg>& jobs, u32* status, bool falling) {
    switch (id) {
#define AS_RUN(id, cfg, all, text) case id: run_all<cfg>(tr, c, jobs, status, falling); break;
        OW_LAB_VARIANTS(AS_RUN)
    }
}

// A chunk in memory of exactly its size (so that ASan sees a read past it), and
// a destination between guard zones.
struct Bench {
    u8* src;
    u8* dst;
    size_t n;
    Bench(const Bytes& stored, size_t logical) : n(logical) {
        void* p = nullptr;
        if (posix_memalign(&p, 16, stored.size())) abort();
        src = (u8*)p;
        memcpy(src, stored.data(), stored.size());
        dst = (u8*)aligned_alloc(256, (n + 2 * kGuard + 255) / 256 * 256);
        memset(dst, 0xa5, n + 2 * kGuard);
    }
    ~Bench() { free(src); free(dst); }
    u8* out() { return dst + kGuard; }
    bool guards() const {
        for (size_t i = 0; i < kGuard; i++) {
            if (dst[i] != 0xa5 || dst[kGuard + n + i] != 0xa5) return false;
        }
        return true;
    }
};

// decode runs variant `id` on one chunk and returns the status word.
inline u32 decode(int id, int tr, const Bytes& stored, Bench& b, uint32_t seg_tiles, bool falling) {
    ow_x16_chunk c = {(u64)(uintptr_t)b.src, (u64)(uintptr_t)b.out(), (u32)stored.size(), (u32)b.n, (uint16_t)seg_tiles, 0, 0};
    std::vector<ow_x16_seg> jobs;
    for (u32 s = 0; s < jobs_of(tr, b.n, seg_tiles); s++) jobs.push_back({0, s});
    u32 status = 0;
    run_variant(id, tr, &c, jobs, &status, falling);
    return status;
}

// check runs variant v on c in both lane orders.
inline int check(const Variant& v, const Case& c) {
    int bad = 0;
    for (int falling = 0; falling < 2; falling++) {
        Bench b(c.stored, c.plain.size());
        u32 status = decode(v.id, c.tr, c.stored, b, c.seg_tiles, falling);
        bool same = memcmp(b.out(), c.plain.data(), b.n) == 0;
        if (c.good != (status == 0) || (c.good && !same) || !b.guards()) {
            printf("FAIL kernel %d, %s, order %d: status %u (reference %s), bytes %s, guards %s\n", v.id, c.name.c_str(),
                   falling, status, c.good ? "accepts" : "refuses", same ? "same" : "differ", b.guards() ? "good" : "BROKEN");
            bad++;
        }
    }
    return bad;
}

inline int correctness() {
    int bad = 0, n = 0;
    for (const Case& c : good_cases()) {
        Bytes ref(c.plain.size());
        if (!reference_decode(c.tr, c.stored, ref.data(), ref.size(), c.seg_tiles) || ref != c.plain) {
            printf("FAIL reference, %s\n", c.name.c_str());
            bad++;
        }
        for (const Variant& v : kVariants) {
            if (v.all || c.tr == OW_BF16) bad += check(v, c), n += 2;
        }
    }
    printf("correctness: %d runs, %d failures\n", n, bad);
    return bad;
}

// Corrupt chunks: the guards stay, the process lives, the kernel accepts what
// the reference accepts, and then gives the same bytes.
inline int corruption(int rounds, uint64_t seed) {
    std::mt19937_64 rng(seed);
    int bad = 0, accepted = 0;
    for (int r = 0; r < rounds; r++) {
        Case c = corrupt_case(rng);
        const Variant* v = &kVariants[rng() % 3];
        accepted += c.good;
        int failed = check(*v, c);
        if (failed) printf("  in round %d of seed %llu\n", r, (unsigned long long)seed);
        bad += failed;
    }
    printf("corruption: %d rounds, seed %llu, %d still valid, %d failures\n", rounds, (unsigned long long)seed, accepted, bad);
    return bad;
}

}  // namespace lab

int main(int argc, char** argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 300;
    uint64_t seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : 1;
    return lab::correctness() + lab::corruption(rounds, seed) ? 1 : 0;
}
