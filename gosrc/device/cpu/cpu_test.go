package cpu

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
)

// present counts how many of n bytes at base are resident. Unmapped addresses do not count.
func present(base unsafe.Pointer, n int64) (bytes int64) {
	const step = 1 << 20
	vec := make([]byte, step/page)
	for at := int64(0); at < n; at += step {
		at := (uintptr(base) + uintptr(at)) &^ (page - 1)
		if _, _, e := unix.Syscall(unix.SYS_MINCORE, at, step, uintptr(unsafe.Pointer(&vec[0]))); e != 0 {
			continue
		}
		for _, v := range vec {
			bytes += int64(v&1) * page
		}
	}
	return bytes
}

// Every tensor gets memory of its size that is zeroed, aligned and separate.
func TestAlloc(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	sizes := []int64{0, 1, 63, 64, 65, small - 1, small, small + 1, arenaBytes, arenaBytes + 1, huge, 3*huge + 5}
	for range 500 {
		sizes = append(sizes, r.Int64N(300<<10))
	}
	mem, err := Alloc(sizes)
	if err != nil {
		t.Fatal(err)
	}
	// Fill and compare whole slices, because the race detector checks every single access.
	ones := bytes.Repeat([]byte{0xff}, int(slices.Max(sizes)))
	for i, m := range mem {
		if m.Bytes != sizes[i] || uintptr(m.Ptr)%Align != 0 || (m.Ptr == nil) != (sizes[i] == 0) {
			t.Fatalf("size %d: %+v", sizes[i], m)
		}
		if bytes.Count(m.Slice(), []byte{0}) != len(m.Slice()) {
			t.Fatal("memory is not zeroed or overlaps other memory")
		}
		copy(m.Slice(), ones)
	}
	// Release in any order. The other tensors must not change.
	for _, i := range r.Perm(len(mem)) {
		if !bytes.Equal(mem[i].Slice(), ones[:len(mem[i].Slice())]) {
			t.Fatal("releasing a tensor changed another one")
		}
		mem[i].Release()
	}
}

// Freeing a large tensor returns its memory to the system, even if it shares a region.
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
		t.Logf("%d bytes of %d are resident", present(m.Ptr, n), n)
	}
	mem[1].Release()
	if left := present(mem[1].Ptr, n); left > n/10 {
		t.Errorf("after freeing one of three: %d bytes of %d are still resident", left, n)
	}
	mem[0].Release()
	mem[2].Release()
	for i, m := range mem {
		if left := present(m.Ptr, n); left > n/10 {
			t.Errorf("after freeing all: %d bytes of %d are still resident in tensor %d", left, n, i)
		}
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

// Writes to a mapped file change only memory. The mapping outlives the file's name and descriptor.
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

// A file of at least a huge page is mapped at a huge page boundary. Its first and last bytes are correct.
func TestMapFileAligned(t *testing.T) {
	for _, size := range []int64{1, page, huge - page, huge - 1, huge, huge + 1, 3*huge + 5} {
		path := filepath.Join(t.TempDir(), "x")
		if err := os.WriteFile(path, bytes.Repeat([]byte{7}, int(size)), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		base, block, err := MapFile(int(f.Fd()), size, 1, false)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		if size >= huge && uintptr(base)%huge != 0 {
			t.Errorf("%d bytes are mapped at %p", size, base)
		}
		m := device.Memory{Ptr: base, Bytes: size, Block: block}
		if s := m.Slice(); s[0] != 7 || s[size-1] != 7 {
			t.Errorf("%d bytes: wrong contents", size)
		}
		m.Release()
	}
}

// Populate returns an error for a truncated mapping.
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
