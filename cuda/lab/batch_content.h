// What batch.cu works on: content of several kinds, and blocks of it by encoders that
// parse as the fast ones do.
#ifndef OVERWIRE_LAB_BATCH_CONTENT_H
#define OVERWIRE_LAB_BATCH_CONTENT_H

#include <algorithm>
#include <string>
#include <vector>

#include "x16_encode.h"

namespace {

using lab::Bytes;

struct Match { uint32_t literals, back, n; };  // n = 0: the end

// Greedy, a table of 4-byte hashes, as the fast encoders are.
std::vector<Match> parse(const Bytes& b) {
    std::vector<Match> out;
    std::vector<int> table(1 << 14, -1);
    auto word = [&](size_t i) { uint32_t v; memcpy(&v, &b[i], 4); return v; };
    size_t at = 0, from = 0, n = b.size();
    while (at + 16 < n) {
        uint32_t h = word(at) * 2654435761u >> 18;
        int c = table[h];
        table[h] = (int)at;
        if (c >= 0 && at - c < 65536 && word(c) == word(at)) {
            size_t m = 4;
            while (at + m + 5 < n && b[c + m] == b[at + m]) m++;
            out.push_back({(uint32_t)(at - from), (uint32_t)(at - c), (uint32_t)m});
            at = from = at + m;
        } else {
            at += 1 + (at - from) / 64;
        }
    }
    out.push_back({(uint32_t)(n - from), 0, 0});
    return out;
}

Bytes lz4(const Bytes& b) {
    Bytes out;
    auto more = [&](int n) { for (n -= 15; n >= 0; n -= 255) out.push_back(std::min(n, 255)); };
    size_t at = 0;
    for (const Match& m : parse(b)) {
        uint32_t n = m.n ? m.n - 4 : 0;
        out.push_back(std::min(m.literals, 15u) << 4 | std::min(n, 15u));
        more(m.literals);
        out.insert(out.end(), b.begin() + at, b.begin() + at + m.literals);
        at += m.literals + m.n;
        if (!m.n) break;
        out.push_back(m.back), out.push_back(m.back >> 8);
        more(n);
    }
    return out;
}

Bytes snappy(const Bytes& b) {
    Bytes out;
    for (size_t v = b.size();; v >>= 7) {
        out.push_back(v < 128 ? v : v | 128);
        if (v < 128) break;
    }
    size_t at = 0;
    for (const Match& m : parse(b)) {
        if (uint32_t n = m.literals) {
            if (n <= 60) out.push_back((n - 1) << 2);
            else if (n <= 256) out.push_back(60 << 2), out.push_back(n - 1);
            else out.push_back((n <= 65536 ? 61 : 62) << 2), out.push_back(n - 1), out.push_back((n - 1) >> 8);
            if (n > 65536) out.push_back((n - 1) >> 16);
            out.insert(out.end(), b.begin() + at, b.begin() + at + n);
        }
        for (uint32_t n = m.n; n;) {
            uint32_t k = n <= 64 ? n : n < 68 ? 60 : 64;
            if (k >= 4 && k <= 11 && m.back < 2048) {
                out.push_back(m.back >> 8 << 5 | (k - 4) << 2 | 1), out.push_back(m.back);
            } else {
                out.push_back((k - 1) << 2 | 2), out.push_back(m.back), out.push_back(m.back >> 8);
            }
            n -= k;
        }
        at += m.literals + m.n;
    }
    return out;
}

// Cascaded with a layer of run lengths, one of differences and one of run
// lengths again, packed, as nvCOMP does by default; int32. A chunk of which
// nothing is left for a layer makes the whole block stored.
Bytes cascaded(const Bytes& b) {
    auto put = [](Bytes& o, uint32_t v) { o.insert(o.end(), (uint8_t*)&v, (uint8_t*)(&v + 1)); };
    auto pack = [&](const std::vector<int64_t>& v, int size) {
        int64_t least = 0, most = 0;
        for (size_t i = 0; i < v.size(); i++) least = i ? std::min(least, v[i]) : v[i], most = i ? std::max(most, v[i]) : v[i];
        uint32_t width = 0;
        while ((uint64_t)(most - least) >> width) width++;
        Bytes o;
        put(o, size == 2 ? (uint32_t)(least & 0xffff) : (uint32_t)least);
        put(o, width << 16 | (uint32_t)v.size());
        size_t at = o.size();
        o.resize(at + (v.size() * width + 31) / 32 * 4);
        for (size_t i = 0; i < v.size() * width; i++) o[at + i / 8] |= ((uint64_t)(v[i / width] - least) >> (i % width) & 1) << (i % 8);
        return o;
    };
    Bytes out = {2, 1, 1, 4};
    put(out, b.size() / 4 * 4);
    for (size_t at = 0; at + 4 <= b.size(); at += 4096) {
        std::vector<int64_t> v;
        for (size_t i = at; i + 4 <= std::min(at + 4096, b.size()); i += 4) { int32_t x; memcpy(&x, &b[i], 4); v.push_back(x); }
        auto runs = [&] {
            std::vector<int64_t> vals, times;
            for (size_t i = 0; i < v.size(); i++) {
                if (i && v[i] == v[i - 1]) times.back()++;
                else vals.push_back(v[i]), times.push_back(1);
            }
            v = vals;
            return pack(times, 2);
        };
        Bytes a = runs();
        int32_t first = (int32_t)v[0];
        for (size_t i = 0; i + 1 < v.size(); i++) v[i] = (int32_t)(uint32_t)(v[i + 1] - v[i]);
        v.pop_back();
        Bytes c = runs(), d = pack(v, 4), chunk;
        put(chunk, 20 + a.size() + c.size() + d.size());
        put(chunk, a.size()), put(chunk, c.size()), put(chunk, d.size()), put(chunk, first);
        for (const Bytes* p : {&a, &c, &d}) chunk.insert(chunk.end(), p->begin(), p->end());
        out.insert(out.end(), chunk.begin(), chunk.end());
    }
    return out;
}

const char* const kKinds[] = {"words", "table", "bf16", "zeros", "noise"};
constexpr int kKindCount = 5;

// Content of a kind: text-like; rows of a table of small numbers; weights; zeros;
// words of random bytes, as codecs_row.py has them.
Bytes content(int kind, size_t n, uint64_t seed) {
    std::mt19937_64 rng(seed);
    Bytes b;
    if (kind == 2) return lab::weights(OW_BF16, n, seed);
    if (kind == 3) return Bytes(n, 0);
    if (kind == 4) {
        std::vector<Bytes> words;
        for (int i = 0; i < 2000; i++) {
            Bytes w(3 + rng() % 21);
            for (auto& c : w) c = (uint8_t)rng();
            words.push_back(w);
        }
        while (b.size() < n) {
            const Bytes& w = words[rng() % 2000];
            b.insert(b.end(), w.begin(), w.end());
        }
    } else if (kind == 0) {
        std::vector<std::string> words;
        for (int i = 0; i < 3000; i++) {
            std::string w;
            for (int k = 2 + rng() % 8; k > 0; k--) w += "etaoinshrdlucmfwypvbgk"[std::min(rng() % 22, rng() % 22)];
            words.push_back(w + ' ');
        }
        while (b.size() < n) {
            const std::string& w = words[std::min({rng() % 3000, rng() % 3000, rng() % 3000})];
            b.insert(b.end(), w.begin(), w.end());
        }
    } else {
        uint32_t id = rng() % 100000;
        while (b.size() < n) {
            uint32_t row[4] = {id += 1 + rng() % 3, (uint32_t)(rng() % 50), (uint32_t)(20240000 + rng() % 30), (uint32_t)(rng() % 8 ? 0 : rng() % 1000)};
            b.insert(b.end(), (uint8_t*)row, (uint8_t*)(row + 4));
        }
    }
    b.resize(n);
    return b;
}

}  // namespace
#endif
