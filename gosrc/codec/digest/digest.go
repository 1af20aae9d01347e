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
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/bits"
	"sync"
	"unsafe"

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

const (
	rowPairs  = 8
	tileBytes = 4096
)

// A Key is the secret of keyed digests. It must not leave the process. A process uses such digests to recognise tensors
// that it has seen before, even if someone who can choose the tensors wants it to mistake one for another.
//
// The key has 18 random words. A tensor is padded with zeros to whole tiles of 512 words. Row r = 32*tile + lane of the
// tensor has the 16 words at 64*k + 2*lane and the next position of the tile, for k from 0 to 7. With lo and hi for the
// halves of a product of 128 bits, and mix and A as for other digests:
//
//	x, y    the sums over k of lo and hi of (w[2k] + key[2k]) * (w[2k+1] + key[2k+1])
//	a, b    the sums over r of lo and hi of (x + mix(key[16] + r*A)) * (y + mix(key[17] + r*A))
//
// The digest follows from a and b as for other digests. These are two levels of the hash NH of UMAC (RFC 4418), with
// words of 64 bits. If the words of the key and the results of mix are random, two tensors of one size that were chosen
// without the key have the same digest with a probability of at most 2^-62: 2^-63 for the rows, and as much for their
// sum.
type Key [2*rowPairs + 2]uint64

// NewKey returns a random key.
func NewKey() *Key {
	k := new(Key)
	_, _ = rand.Read(unsafe.Slice((*byte)(unsafe.Pointer(k)), unsafe.Sizeof(*k))) // never fails
	return k
}

// ProcessKey returns the key of this process.
var ProcessKey = sync.OnceValue(NewKey)

// Add adds bytes of a tensor to a keyed State. at must be a multiple of tileBytes, and so must len(p) unless p ends the
// tensor.
func (key *Key) Add(s *State, at int64, p []byte) {
	row := uint64(at) / tileBytes * 32 * stepA
	for ; len(p) >= tileBytes; p = p[tileBytes:] {
		key.addTile(s, row, (*[tileBytes]byte)(p))
		row += 32 * stepA & (1<<64 - 1)
	}
	if len(p) > 0 {
		var last [tileBytes]byte
		copy(last[:], p)
		key.addTile(s, row, &last)
	}
}

// addTile adds a tile. row is the number of its first row, times stepA.
func (key *Key) addTile(s *State, row uint64, tile *[tileBytes]byte) {
	const lanes, pair = 32, 2 * WordBytes
	for lane := range lanes {
		var x, y uint64
		for k := range rowPairs {
			w := tile[(lanes*k+lane)*pair:][:pair]
			v := binary.LittleEndian.Uint64(w) + key[2*k]
			hi, lo := bits.Mul64(v, binary.LittleEndian.Uint64(w[WordBytes:])+key[2*k+1])
			x += lo
			y += hi
		}
		hi, lo := bits.Mul64(x+mixWord(key[2*rowPairs]+row), y+mixWord(key[2*rowPairs+1]+row))
		s.A += lo
		s.B += hi
		row += stepA
	}
}

// A View is a tensor in host memory or, for GPU kernels, in the memory of that GPU. Strides are in bytes and may be
// negative or zero. Item is the element size in bytes: 1, 2, 4, 8 or 16.
type View struct {
	Address        uint64
	Item           int64
	Shape, Strides []int64
}

// Contiguous returns a view of contiguous bytes.
func Contiguous(address uint64, bytes int64) View {
	return View{Address: address, Item: 1, Shape: []int64{bytes}, Strides: []int64{1}}
}

// MaxRank is the maximum number of dimensions of a view.
const MaxRank = 64

// Bytes returns the size of the tensor's contiguous copy, or an error if the view is invalid.
func (v *View) Bytes() (int64, error) {
	if v.Item < 1 || v.Item > 16 || v.Item&(v.Item-1) != 0 || len(v.Shape) != len(v.Strides) || len(v.Shape) > MaxRank {
		return 0, errs.New(errs.ErrArgument, "invalid tensor: %d dimensions, %d strides and elements of %d bytes",
			len(v.Shape), len(v.Strides), v.Item)
	}
	n, zero := v.Item, false
	for _, d := range v.Shape {
		if d < 0 {
			return 0, errs.New(errs.ErrArgument, "invalid dimension %d: expected 0 or more", d)
		}
		zero = zero || d == 0
	}
	for _, d := range v.Shape {
		if zero {
			return 0, nil
		}
		if n > (1<<62)/d {
			return 0, errs.New(errs.ErrArgument, "the tensor of shape %v is too large", v.Shape)
		}
		n *= d
	}
	if v.Address == 0 {
		return 0, errs.New(errs.ErrArgument, "invalid address 0 for a tensor of %d bytes", n)
	}
	return n, nil
}

// Merged returns the same view with as few dimensions as possible, none of them of size 1. A contiguous tensor
// becomes one dimension of bytes. The view must not be empty.
func (v *View) Merged() View {
	m := View{Address: v.Address, Item: v.Item}
	for i, d := range v.Shape {
		s := v.Strides[i]
		if d == 1 {
			continue
		}
		if k := len(m.Shape) - 1; k >= 0 && m.Strides[k] == s*d {
			m.Shape[k] *= d
			m.Strides[k] = s
			continue
		}
		m.Shape, m.Strides = append(m.Shape, d), append(m.Strides, s)
	}
	if len(m.Shape) == 0 {
		m.Shape, m.Strides = []int64{1}, []int64{m.Item}
	}
	if len(m.Shape) == 1 && m.Strides[0] == m.Item {
		return Contiguous(m.Address, m.Shape[0]*m.Item)
	}
	return m
}

// IsContiguous reports whether a merged view is contiguous.
func (v *View) IsContiguous() bool { return len(v.Shape) == 1 && v.Strides[0] == 1 && v.Item == 1 }

// hostPointer converts a host address to a pointer. The memory must not be managed by Go's garbage collector, or must
// be kept alive.
func hostPointer(a uint64) unsafe.Pointer {
	p := uintptr(a)
	return *(*unsafe.Pointer)(unsafe.Pointer(&p))
}

// gathered is the size of the buffer for the elements of strided views.
const gathered = 32 << 10

// addBytes adds bytes [at, at+n) of a merged view to s. at must be a multiple of 16, or of tileBytes if there is a key,
// and so must n unless the bytes are the last ones.
func (v *View) addBytes(s *State, at, n int64, key *Key) {
	add := s.Add
	if key != nil {
		add = func(at int64, p []byte) { key.Add(s, at, p) }
	}
	if v.IsContiguous() {
		add(at, unsafe.Slice((*byte)(hostPointer(v.Address+uint64(at))), n))
		return
	}
	var buf [gathered]byte
	w := v.walkFrom(at / v.Item)
	for n > 0 {
		k := min(n, gathered)
		w.readElements(buf[:k])
		add(at, buf[:k])
		at, n = at+k, n-k
	}
}

// A walker is a position in a view.
type walker struct {
	v    *View
	at   uint64 // address of the element
	coor [MaxRank]int64
}

// walkFrom returns a walker at an element of the view.
func (v *View) walkFrom(element int64) *walker {
	w := &walker{v: v, at: v.Address}
	for i := len(v.Shape) - 1; i >= 0; i-- {
		w.coor[i] = element % v.Shape[i]
		element /= v.Shape[i]
		w.at += uint64(w.coor[i] * v.Strides[i])
	}
	return w
}

// readElements copies the next elements until p is full.
func (w *walker) readElements(p []byte) {
	v, last := w.v, len(w.v.Shape)-1
	item, stride := v.Item, v.Strides[last]
	for len(p) > 0 {
		run := min(v.Shape[last]-w.coor[last], int64(len(p))/item)
		bytes := run * item
		if stride == item {
			copy(p[:bytes], unsafe.Slice((*byte)(hostPointer(w.at)), bytes))
		} else {
			gatherElements(p[:bytes], w.at, stride, item)
		}
		p = p[bytes:]
		w.coor[last] += run
		w.at += uint64(run * stride)
		for i := last; i > 0 && w.coor[i] == v.Shape[i]; i-- {
			w.at += uint64(v.Strides[i-1] - v.Shape[i]*v.Strides[i])
			w.coor[i] = 0
			w.coor[i-1]++
		}
	}
}

// gatherElements copies elements that are stride bytes apart.
func gatherElements(p []byte, at uint64, stride, item int64) {
	switch item {
	case 1:
		gatherTyped[uint8](p, at, stride)
	case 2:
		gatherTyped[uint16](p, at, stride)
	case 4:
		gatherTyped[uint32](p, at, stride)
	case 8:
		gatherTyped[uint64](p, at, stride)
	default:
		gatherTyped[[2]uint64](p, at, stride)
	}
}

func gatherTyped[T any](p []byte, at uint64, stride int64) {
	out := unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(p))), len(p)/int(unsafe.Sizeof(*new(T))))
	for i := range out {
		out[i] = *(*T)(hostPointer(at))
		at += uint64(stride)
	}
}
