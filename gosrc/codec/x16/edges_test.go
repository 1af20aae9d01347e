//go:build linux

package x16

import (
	"bytes"
	"math/rand/v2"
	"runtime/debug"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/tensor"
)

// fenced is memory between two inaccessible pages, the fences.
type fenced struct{ all, room []byte }

func newFenced(t *testing.T, n int) *fenced {
	t.Helper()
	size := (n + unix.Getpagesize() - 1) &^ (unix.Getpagesize() - 1)
	all, err := unix.Mmap(-1, 0, size+2*unix.Getpagesize(), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(all) })
	room := all[unix.Getpagesize() : unix.Getpagesize()+size]
	if err := unix.Mprotect(room, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		t.Fatal(err)
	}
	return &fenced{all, room}
}

// end returns the last n bytes before a fence, and begin the first n bytes after one.
func (f *fenced) end(n int) []byte   { return f.room[len(f.room)-n : len(f.room) : len(f.room)] }
func (f *fenced) begin(n int) []byte { return f.room[:n:n] }

// No decoder reads outside a valid or invalid chunk, or writes outside its destination. Both are next to inaccessible
// memory.
func TestFences(t *testing.T) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	w := pageWriter{rand.New(rand.NewPCG(seed, 0))}
	const most = 1 << 17
	src, dst := newFenced(t, most), newFenced(t, most)
	run := func(what string, l Level, tr uint8, chunk []byte, size int, st uint16, want []byte) {
		t.Helper()
		defer func() {
			if r := recover(); r != nil {
				t.Fatalf("%v, %s, %s, %d bytes from %d: %v", l, Name(tr), what, size, len(chunk), r)
			}
		}()
		for _, at := range [][2][]byte{{src.end(len(chunk)), dst.end(size)}, {src.begin(len(chunk)), dst.begin(size)}} {
			copy(at[0], chunk)
			err := DecodeAt(l, at[1], at[0], tr, st)
			if want != nil && (err != nil || !bytes.Equal(at[1], want)) {
				t.Fatalf("%v, %s, %s: %v", l, Name(tr), what, err)
			}
			c := tensor.Chunk{Codec: tensor.CodecX16, Transform: tr, SegTiles: st, Logical: uint32(size),
				Stored: uint32(len(chunk))}
			if err := Check(at[0], c); want != nil && err != nil {
				t.Fatal(err)
			}
		}
	}
	for tr := uint8(BF16); tr <= Bytes; tr++ {
		for range 12 {
			tiles := 1 + w.r.IntN(9)
			st := 1 + w.r.IntN(tiles)
			size := sizeOf(tr, tiles, w.r.IntN(70))
			chunk, logical := w.chunk(tr, size, st)
			for _, l := range Levels() {
				run("good", l, tr, chunk, size, uint16(st), logical)
				for range 6 {
					p := bytes.Clone(chunk)
					hurt(w.r, p)
					run("hurt", l, tr, p, size, uint16(st), nil)
					run("cut", l, tr, chunk[:w.r.IntN(len(chunk))], size, uint16(st), nil)
				}
			}
		}
	}
}

// No encoder reads outside its source, which is placed next to inaccessible memory.
func TestFencedSources(t *testing.T) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	const seed = 31
	src := newFenced(t, 1<<16)
	for _, n := range []int{256, 257, 1000, 4096, 4100} {
		for _, s := range samples(rand.New(rand.NewPCG(seed, uint64(n))), n) {
			for _, l := range Levels() {
				e := Encoder{level: l, forced: true}
				func() {
					defer func() {
						if r := recover(); r != nil {
							t.Fatalf("%v, %s, %d bytes: %v", l, s.name, len(s.data), r)
						}
					}()
					for _, p := range [][]byte{src.end(len(s.data)), src.begin(len(s.data))} {
						copy(p, s.data)
						e.Encode(nil, p, s.transform)
						Estimate(p, s.transform)
					}
				}()
			}
		}
	}
}
