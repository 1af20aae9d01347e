package publish

import (
	"bytes"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device/pinned"
	"github.com/overwire/overwire/gosrc/source"
)

// A viewer is a draft that counts the bytes passed to WriteView, and how many of them are in a memory range.
type viewer struct {
	source.Output
	mu     sync.Mutex
	lo, hi uintptr
	views  int
	inside int
	whole  []byte
}

func (v *viewer) WriteView(p []byte, off int64) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.views += len(p)
	if at := uintptr(unsafe.Pointer(&p[0])); at >= v.lo && at < v.hi {
		v.inside += len(p)
	}
	copy(v.whole[off:], p)
	return nil
}

// Staged bytes are written with WriteView from the staged memory, so a store need not copy them.
func TestStagedViews(t *testing.T) {
	mem, err := pinned.Take(1<<20, 1<<20, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Keep()
	mem.Want(1 << 20)
	v := &viewer{whole: make([]byte, 600)}
	s := (&StagedMemory{mem: mem, most: 1 << 20}).Stage(t.Context(), v, new(atomic.Int64))
	want := bytes.Repeat([]byte("abc"), 200)
	for off := 0; off < len(want); off += 100 {
		if err := s.Write(want[off:off+100], int64(off)); err != nil {
			t.Fatal(err)
		}
	}
	memory := mem.Bytes(0, 600)
	v.lo = uintptr(unsafe.Pointer(&memory[0]))
	v.hi = v.lo + 600
	if err := s.Flush(t.Context(), 2, func(int64) {}); err != nil {
		t.Fatal(err)
	}
	if v.views != 600 || v.inside != 600 || !bytes.Equal(v.whole, want) {
		t.Errorf("%d of %d bytes from the stage, %q", v.inside, v.views, v.whole)
	}
}
