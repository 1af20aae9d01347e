//go:build owfake

package stream

import (
	"bytes"
	"encoding/binary"
	"flag"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/nvcomp/lz4"
	"github.com/overwire/overwire/gosrc/nvcomp/snappy"
)

// A fence is memory between two inaccessible pages. An access outside it ends the test process.
type fence struct {
	all   []byte
	bytes []byte
}

const page = 4096

// fenced returns n bytes that end before the second inaccessible page (far), or begin after the first one.
func fenced(t testing.TB, n int, far bool) fence {
	t.Helper()
	room := (n + page - 1) / page * page
	all, err := syscall.Mmap(-1, 0, room+2*page, syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range [][]byte{all[:page], all[page+room:]} {
		if err := syscall.Mprotect(p, syscall.PROT_NONE); err != nil {
			t.Fatal(err)
		}
	}
	at := page
	if far {
		at += room - n
	}
	return fence{all, all[at : at+n : at+n]}
}

func (f fence) free() { syscall.Munmap(f.all) }

func (f fence) addr() uint64 {
	if len(f.bytes) == 0 {
		return uint64(uintptr(unsafe.Pointer(&f.all[0]))) + page
	}
	return uint64(uintptr(unsafe.Pointer(&f.bytes[0])))
}

// twinOne decodes a block with a host twin to `room` bytes, once with each kind of fence. It returns the bytes and the
// status.
func twinOne(t testing.TB, kernel string, src []byte, room int, arg uint32) (out []byte, status uint32) {
	t.Helper()
	var items [2]twinItem
	var in, to [2]fence
	for i := range items {
		in[i], to[i] = fenced(t, len(src), i == 1), fenced(t, room, i == 1)
		defer in[i].free()
		defer to[i].free()
		copy(in[i].bytes, src)
		items[i] = twinItem{src: in[i].addr(), srcLen: uint64(len(src)), dst: to[i].addr(), dstCap: uint64(room),
			status: 77, arg: arg}
	}
	runTwin(kernel, items[:])
	a, b := items[0], items[1]
	if a.status != b.status || a.written != b.written {
		t.Fatalf("%s: status %d and %d, %d and %d bytes of %x", kernel, a.status, b.status, a.written, b.written, src)
	}
	if a.status != 0 {
		return nil, a.status
	}
	out = bytes.Clone(to[0].bytes[:a.written])
	if !bytes.Equal(out, to[1].bytes[:a.written]) {
		t.Fatalf("%s: the order of lanes changes the bytes", kernel)
	}
	return out, 0
}

// plainLZ4 and plainSnappy decode byte by byte. They return false for a block that they reject.
func plainLZ4(src []byte, room int) (out []byte, ok bool) {
	length := func(n int) (int, bool) {
		for more := n == 15; more; {
			if len(src) == 0 {
				return 0, false
			}
			n += int(src[0])
			more = src[0] == 255
			src = src[1:]
		}
		return n, true
	}
	for len(src) > 0 {
		token := src[0]
		src = src[1:]
		n, ok := length(int(token >> 4))
		if !ok || n > len(src) || n > room-len(out) {
			return nil, false
		}
		out, src = append(out, src[:n]...), src[n:]
		if len(src) == 0 {
			return out, true
		}
		if len(src) < 2 {
			return nil, false
		}
		back := int(binary.LittleEndian.Uint16(src))
		src = src[2:]
		if n, ok = length(int(token & 15)); !ok || back == 0 || back > len(out) || n+4 > room-len(out) {
			return nil, false
		}
		for range n + 4 {
			out = append(out, out[len(out)-back])
		}
	}
	return nil, false
}

func plainSnappy(src []byte, room int) (out []byte, ok bool) {
	said, n := binary.Uvarint(src)
	if n <= 0 || n > 5 || said > 1<<32-1 || said > uint64(room) {
		return nil, false
	}
	word := func(n int) (v int, ok bool) {
		if n > len(src) {
			return 0, false
		}
		for i := range n {
			v |= int(src[i]) << (8 * i)
		}
		src = src[n:]
		return v, true
	}
	for src = src[n:]; len(src) > 0; {
		tag, _ := word(1)
		n, back, ok := tag>>2+1, 0, true
		switch tag & 3 {
		case 0:
			if n > 60 {
				n, ok = word(n - 60)
				n++
			}
			if !ok || n > len(src) || n > int(said)-len(out) {
				return nil, false
			}
			out, src = append(out, src[:n]...), src[n:]
			continue
		case 1:
			n = tag>>2&7 + 4
			back, ok = word(1)
			back |= tag >> 5 << 8
		case 2:
			back, ok = word(2)
		case 3:
			back, ok = word(4)
		}
		if !ok || back == 0 || back > len(out) || n > int(said)-len(out) {
			return nil, false
		}
		for range n {
			out = append(out, out[len(out)-back])
		}
	}
	if len(out) != int(said) {
		return nil, false
	}
	return out, true
}

// An lz describes one of the two formats. It has the library's encoder, a plain decoder to compare the kernel with, and
// a writer of elements that the library does not use.
type lz struct {
	kernel string
	encode func(dst, src []byte) ([]byte, error)
	plain  func(src []byte, room int) ([]byte, bool)
	write  func(r *rand.Rand, n int) (stored, content []byte)
}

var lzs = []lz{
	{"lz4", lz4.Encode, plainLZ4, writeLZ4},
	{"snappy", snappy.Encode, plainSnappy, writeSnappy},
}

// distance returns the distance of a match, which is often short and sometimes the longest possible.
func distance(r *rand.Rand, have, most int) int {
	most = min(have, most)
	switch r.IntN(4) {
	case 0:
		return 1 + r.IntN(min(most, 8))
	case 1:
		return 1 + r.IntN(min(most, 70))
	case 2:
		return most
	}
	return 1 + r.IntN(most)
}

// extent returns a length, which is usually short.
func extent(r *rand.Rand) int {
	return [4]int{r.IntN(6), r.IntN(20), r.IntN(140), r.IntN(3000)}[min(r.IntN(6), r.IntN(6), 3)]
}

func random8(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func repeated(out []byte, back, n int) []byte {
	for range n {
		out = append(out, out[len(out)-back])
	}
	return out
}

func writeLZ4(r *rand.Rand, sequences int) (stored, content []byte) {
	length := func(n int) {
		for n -= 15; n >= 0; n -= 255 {
			stored = append(stored, byte(min(n, 255)))
		}
	}
	for i := range sequences {
		n, m := extent(r), extent(r)
		if len(content)+n == 0 {
			n = 1
		}
		if i == sequences-1 {
			m = 0
		}
		stored = append(stored, byte(min(n, 15)<<4|min(m, 15)))
		length(n)
		b := random8(r, n)
		stored, content = append(stored, b...), append(content, b...)
		if i == sequences-1 {
			break
		}
		back := distance(r, len(content), 65535)
		stored = binary.LittleEndian.AppendUint16(stored, uint16(back))
		length(m)
		content = repeated(content, back, m+4)
	}
	return
}

func writeSnappy(r *rand.Rand, elements int) (stored, content []byte) {
	for i := range elements {
		if i == 0 || r.IntN(3) == 0 {
			n := 1 + extent(r)
			switch least := max(1, (32-leading(uint32(n-1))+7)/8); {
			case n <= 60 && r.IntN(5) > 0:
				stored = append(stored, byte((n-1)<<2))
			default: // in at least as many bytes as needed
				extra := least + r.IntN(5-least)
				stored = append(stored, byte((59+extra)<<2))
				for k := range extra {
					stored = append(stored, byte((n-1)>>(8*k)))
				}
			}
			b := random8(r, n)
			stored, content = append(stored, b...), append(content, b...)
			continue
		}
		switch n := 1 + r.IntN(64); r.IntN(3) {
		case 0:
			n = 4 + r.IntN(8)
			back := distance(r, len(content), 2047)
			stored = append(stored, byte(back>>8<<5|(n-4)<<2|1), byte(back))
			content = repeated(content, back, n)
		case 1:
			back := distance(r, len(content), 65535)
			stored = append(stored, byte((n-1)<<2|2), byte(back), byte(back>>8))
			content = repeated(content, back, n)
		default:
			back := distance(r, len(content), 1<<30)
			stored = binary.LittleEndian.AppendUint32(append(stored, byte((n-1)<<2|3)), uint32(back))
			content = repeated(content, back, n)
		}
	}
	return append(binary.AppendUvarint(nil, uint64(len(content))), stored...), content
}

func leading(v uint32) (n int) {
	for n = 32; v > 0; v >>= 1 {
		n--
	}
	return
}

// The twins decode the libraries' output for every kind of content, with lengths around the kernels' limits.
func TestTwinLZRoundTrips(t *testing.T) {
	r := random(t)
	kinds := map[string]func(n int) []byte{
		"noise":   func(n int) []byte { return random8(r, n) },
		"zeros":   func(n int) []byte { return make([]byte, n) },
		"bf16":    func(n int) []byte { return weights(r, 1, n) },
		"int8":    func(n int) []byte { return weights(r, 6, n) },
		"periods": func(n int) []byte { return repeated(random8(r, 37), 37, n)[37:] },
		"words": func(n int) (b []byte) {
			for len(b) < n {
				b = append(b, "the weights of a model and the bytes of them are here "[r.IntN(40):][:1+r.IntN(14)]...)
			}
			return b[:n]
		},
	}
	for _, f := range lzs {
		for name, make := range kinds {
			for _, n := range []int{0, 1, 7, 31, 33, 64, 65, 511, 513, 1100, 5000, 65536 + r.IntN(9000)} {
				want := make(n)
				stored, err := f.encode(nil, want)
				if err != nil {
					t.Fatal(err)
				}
				for _, room := range []int{n, n + 100} {
					got, status := twinOne(t, f.kernel, stored, room, 0)
					if status != 0 || !bytes.Equal(got, want) {
						t.Fatalf("%s of %d bytes of %s: status %d, or wrong bytes", f.kernel, n, name, status)
					}
					if n > 2000 {
						break
					}
				}
				if n > 0 {
					if _, status := twinOne(t, f.kernel, stored, n-1, 0); status != batchRoom {
						t.Fatalf("%s of %d bytes of %s to one byte less: status %d", f.kernel, n, name, status)
					}
				}
			}
		}
	}
}

// The twins decode elements of every length and distance, including those that no library uses.
func TestTwinLZElements(t *testing.T) {
	r := random(t)
	for _, f := range lzs {
		for range 100 {
			stored, want := f.write(r, 1+r.IntN(60))
			if plain, ok := f.plain(stored, len(want)); !ok || !bytes.Equal(plain, want) {
				t.Fatalf("%s: the test's own reader disagrees with its writer", f.kernel)
			}
			if got, status := twinOne(t, f.kernel, stored, len(want), 0); status != 0 || !bytes.Equal(got, want) {
				t.Fatalf("%s: status %d, or wrong bytes, of %x", f.kernel, status, stored)
			}
		}
	}
}

// The twins accept and reject the same damaged blocks as the plain decoders, for every truncation and every flipped bit
// of small blocks, and some damage in large ones. Accepted blocks decode to the same bytes.
func TestTwinLZDamage(t *testing.T) {
	r := random(t)
	for _, f := range lzs {
		refused, accepted := 0, 0
		try := func(stored []byte, room int) {
			want, ok := f.plain(stored, room)
			got, status := twinOne(t, f.kernel, stored, room, 0)
			if ok != (status == 0) || !bytes.Equal(got, want) {
				t.Fatalf("%s: status %d, plain decoder %v, of %x with room for %d", f.kernel, status, ok, stored, room)
			}
			if ok {
				accepted++
			} else {
				refused++
			}
		}
		for range 3 {
			stored, content := f.write(r, 5)
			for len(stored) > 90 {
				stored, content = f.write(r, 5)
			}
			room := len(content) + r.IntN(2)*r.IntN(300)
			for n := range stored {
				try(stored[:n], room)
				for bit := range 8 {
					b := bytes.Clone(stored)
					b[n] ^= 1 << bit
					try(b, room)
				}
			}
			try(append(bytes.Clone(stored), 0), room)
		}
		for range 300 {
			stored, content := f.write(r, 20)
			for range 1 + r.IntN(3) {
				stored[r.IntN(len(stored))] = byte(r.Uint32())
			}
			try(stored[:len(stored)-r.IntN(2)*r.IntN(len(stored))], len(content))
		}
		for range 300 {
			try(random8(r, r.IntN(100)), 5000)
		}
		t.Logf("%s: %d rejected, %d still valid", f.kernel, refused, accepted)
		if refused < 300 || accepted < 100 {
			t.Error("too few blocks were accepted or rejected")
		}
	}
}

var weights = cudatest.Weights

var seedFlag = flag.Uint64("cuda.seed", 0, "seed of random tests; 0 means the clock")

func random(t testing.TB) *rand.Rand {
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}
