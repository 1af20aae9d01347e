package cpu

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
)

// rss is the resident memory of this process in bytes.
func rss(t *testing.T) int64 {
	t.Helper()
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Skip(err)
	}
	pages, err := strconv.ParseInt(strings.Fields(string(b))[1], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return pages * 4096
}

// Every tensor has memory of its own size: zeroed, aligned, separate.
func TestAlloc(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	sizes := []int64{0, 1, 63, 64, 65, small - 1, small, small + 1, slabBytes, slabBytes + 1, huge, 3*huge + 5}
	for range 500 {
		sizes = append(sizes, r.Int64N(300<<10))
	}
	mem, err := Alloc(sizes)
	if err != nil {
		t.Fatal(err)
	}
	for i, m := range mem {
		if m.Bytes != sizes[i] || uintptr(m.Ptr)%Align != 0 || (m.Ptr == nil) != (sizes[i] == 0) {
			t.Fatalf("size %d: %+v", sizes[i], m)
		}
		for _, b := range m.Slice() {
			if b != 0 {
				t.Fatal("not zeroed, or not apart")
			}
		}
		for j := range m.Slice() {
			m.Slice()[j] = 0xff
		}
	}
	// Release in any order; the rest stays as it was.
	for _, i := range r.Perm(len(mem)) {
		for _, b := range mem[i].Slice() {
			if b != 0xff {
				t.Fatal("changed by the release of another")
			}
		}
		mem[i].Release()
	}
}

// Freeing one large tensor frees its memory, though it shares a region.
func TestReleaseReturnsMemory(t *testing.T) {
	const n = 64 << 20
	mem, err := Alloc([]int64{n, n, n})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range mem {
		for i := int64(0); i < n; i += page {
			m.Slice()[i] = 1
		}
	}
	full := rss(t)
	mem[1].Release()
	if fell := full - rss(t); fell < n*9/10 {
		t.Errorf("one of three freed: %d bytes came back of %d", fell, n)
	}
	mem[0].Release()
	mem[2].Release()
	if fell := full - rss(t); fell < 3*n*9/10 {
		t.Errorf("all freed: %d bytes came back of %d", fell, 3*n)
	}
}

func TestAllocRefuses(t *testing.T) {
	for _, sizes := range [][]int64{{-1}, {5, 1 << 62}, {1 << 50}, {1 << 45, 1 << 45, 100}} {
		if mem, err := Alloc(sizes); err == nil {
			Release(mem)
			t.Errorf("%v: allocated", sizes)
		} else if !errors.Is(err, errs.ErrMemory) && !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%v: %v", sizes, err)
		}
	}
}

// A mapped file can be written in memory, and stays as it is on disk; it
// outlives its name and its descriptor.
func TestMapFile(t *testing.T) {
	want := bytes.Repeat([]byte("0123456789abcdef"), 1000)
	path := filepath.Join(t.TempDir(), "x")
	if err := os.WriteFile(path, want, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	base, block, err := MapFile(int(f.Fd()), int64(len(want)), 2, false)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	if err := Populate(unsafe.Add(base, 17), 12_000); err != nil {
		t.Fatal(err)
	}
	m := device.Memory{Ptr: base, Bytes: int64(len(want)), Block: block}
	m.Slice()[5] = 'X'
	on, _ := os.ReadFile(path)
	if !bytes.Equal(on, want) {
		t.Error("a write reached the file")
	}
	os.Remove(path)
	m.Release()
	if !bytes.Equal(m.Slice()[6:], want[6:]) {
		t.Error("mapped bytes differ")
	}
	m.Release()
}

// A truncated mapping gives an error when it is populated.
func TestPopulateTruncated(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	if err := os.WriteFile(path, make([]byte, 100_000), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	base, block, err := MapFile(int(f.Fd()), 100_000, 1, false)
	if err != nil {
		t.Fatal(err)
	}
	defer device.Memory{Ptr: base, Bytes: 1, Block: block}.Release()
	if err := os.Truncate(path, 10); err != nil {
		t.Fatal(err)
	}
	if err := Populate(base, 100_000); !errors.Is(err, errs.ErrIO) {
		t.Errorf("%v, want ErrIO", err)
	}
}
