// Package digest computes the digest of a tensor's bytes: 128 bits that are the same on the CPU and on the GPU
// (cuda/digest.cuh), regardless of the order in which the bytes are read.
//
// The input is the contiguous tensor in row-major order. Its bytes form little-endian 64-bit words w[0], w[1], ...;
// the last word is padded with zeros. All arithmetic is modulo 2^64:
//
//	mix(x)  x ^= x >> 32; x *= M1; x ^= x >> 32; x *= M2; x ^= x >> 32
//	t[i]    mix(w[i] + (i + 1) * A)
//	a       the sum of all t[i]
//	b       the sum of all t[i] * (t[i] >> 32 | 1)
//	high    mix(a + (bytes + 1) * B)
//	low     mix(b + high)
//
// The digest is not cryptographic. docs/format.md section 6 says which changes it detects. key.go has keyed digests.
//
// Unless documented otherwise, everything in this package is safe for concurrent use.
package digest

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"sync"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// The constants are the fractional parts of the golden ratio and of the square roots of 7, 3 and 5, times 2^64.
const (
	stepA = 0x9e3779b97f4a7c15
	mulM1 = 0xa54ff53a5f1d36f1
	mulM2 = 0xbb67ae8584caa73b
	sizeB = 0x3c6ef372fe94f82b
)

// WordBytes is the word size of a digest. Parts start at multiples of it.
const WordBytes = 8

func mixWord(x uint64) uint64 {
	x ^= x >> 32
	x *= mulM1
	x ^= x >> 32
	x *= mulM2
	return x ^ x>>32
}

// A Sum is the digest of a tensor. Sums can be compared with ==.
type Sum struct{ High, Low uint64 }

// String returns the digest as 32 hex digits, the high half first.
func (s Sum) String() string { return fmt.Sprintf("%016x%016x", s.High, s.Low) }

// ParseSum returns the digest that String has written.
func ParseSum(text string) (s Sum, err error) {
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != 16 {
		return Sum{}, errs.New(errs.ErrArgument, "invalid digest %.40q: expected 32 hexadecimal digits", text)
	}
	return Sum{binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:])}, nil
}

// A State is the sum of a part of a tensor. The zero State is empty. The States of disjoint parts can be merged. A
// State is not safe for concurrent use.
type State struct{ A, B uint64 }

// Add adds the bytes p, which start at byte `at` of the tensor. at must be a multiple of WordBytes, and so must
// len(p) unless p ends the tensor.
func (s *State) Add(at int64, p []byte) {
	n := len(p) / WordBytes
	first := uint64(at) / WordBytes
	words := sumFast(s, first, p[:n*WordBytes])
	sumScalar(s, first+uint64(words), p[words*WordBytes:n*WordBytes])
	if rest := p[n*WordBytes:]; len(rest) > 0 {
		var last [WordBytes]byte
		copy(last[:], rest)
		sumScalar(s, first+uint64(n), last[:])
	}
}

// Merge adds the sum of another part.
func (s *State) Merge(other State) {
	s.A += other.A
	s.B += other.B
}

// Sum returns the digest of a tensor of n bytes after all of them have been added.
func (s State) Sum(n int64) Sum {
	high := mixWord(s.A + (uint64(n)+1)*sizeB)
	return Sum{high, mixWord(s.B + high)}
}

// sumScalar sums whole words. i is the number of the first word in the tensor. The faster functions must give the
// same result.
func sumScalar(s *State, i uint64, p []byte) {
	x := (i + 1) * stepA
	var a, b uint64
	for ; len(p) >= WordBytes; p = p[WordBytes:] {
		t := mixWord(binary.LittleEndian.Uint64(p) + x)
		a += t
		b += t * (t>>32 | 1)
		x += stepA
	}
	s.Merge(State{a, b})
}

// Of returns the digest of contiguous bytes.
func Of(p []byte) Sum {
	var s State
	s.Add(0, p)
	return s.Sum(int64(len(p)))
}

// share is the number of bytes that a worker sums at a time.
const share = 4 << 20

// All computes the digest of each view of host memory with several workers, or the keyed digest if key is not nil. The
// memory must not change until it returns.
func All(ctx context.Context, views []View, workers int, key *Key) ([]Sum, error) {
	type task struct {
		view  int
		at, n int64
	}
	var tasks []task
	sizes, parts := make([]int64, len(views)), make([]View, len(views))
	for i := range views {
		n, err := views[i].Bytes()
		if err != nil {
			return nil, err
		}
		if sizes[i] = n; n > 0 {
			parts[i] = views[i].Merged()
		}
		for at := int64(0); at < n; at += share {
			tasks = append(tasks, task{i, at, min(share, n-at)})
		}
	}
	var mu sync.Mutex
	states := make([]State, len(views))
	err := spawn.Each(ctx, "digest", max(workers, 1), len(tasks), func(k int) error {
		var s State
		t := tasks[k]
		parts[t.view].addBytes(&s, t.at, t.n, key)
		mu.Lock()
		states[t.view].Merge(s)
		mu.Unlock()
		return nil
	})
	if err != nil {
		return nil, err
	}
	out := make([]Sum, len(views))
	for i := range out {
		out[i] = states[i].Sum(sizes[i])
	}
	return out, nil
}
