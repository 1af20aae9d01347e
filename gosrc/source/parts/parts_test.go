package parts

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/errs"
)

// A memory is a store that keeps the parts it receives.
type memory struct {
	mu       sync.Mutex
	parts    map[int][]byte
	places   [][]byte // the memory from which parts were sent
	object   []byte   // published
	shown    bool
	aborted  int
	fail     int // number of the part that fails; -1 means none
	inFlight atomic.Int64
	most     atomic.Int64
}

var errPart = errs.New(errs.ErrIO, "this part fails")

func (m *memory) URI() string { return "mem://x" }

func (m *memory) Part(ctx context.Context, k int, p [][]byte) error {
	n := m.inFlight.Add(1)
	defer m.inFlight.Add(-1)
	for old := m.most.Load(); n > old && !m.most.CompareAndSwap(old, n); old = m.most.Load() {
	}
	if k == m.fail {
		return errPart
	}
	time.Sleep(time.Duration(rand.IntN(300)) * time.Microsecond)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.parts[k] != nil {
		return errs.New(errs.ErrEngine, "part %d was sent twice", k)
	}
	m.parts[k] = bytes.Join(p, nil)
	m.places = append(m.places, p...)
	return nil
}

func (m *memory) Publish(_ context.Context, n int, whole []byte) error {
	m.object = bytes.Clone(whole)
	for k := range n {
		m.object = append(m.object, m.parts[k]...)
	}
	m.shown = true
	return nil
}

func (m *memory) UndoPublish(context.Context) error { return nil }

func (m *memory) Abort() { m.aborted++ }

// The object is correct for any order of writes within a window, with gaps that read as zeros, and with its
// beginning written last.
func TestBytesAnyOrder(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	for round := range 60 {
		part := int64(50 + r.IntN(5000))
		size := int64(r.IntN(60_000))
		front := min(size, int64(r.IntN(9000)))
		want := make([]byte, size)
		m := &memory{parts: map[int][]byte{}, fail: -1}
		d := New(context.Background(), m, part, 1+r.IntN(4))
		type piece struct{ lo, hi int64 }
		var pieces []piece
		for at := front; at < size; {
			hi := min(size, at+1+int64(r.IntN(3000)))
			if r.IntN(4) == 0 && hi < size {
				if err := d.Skip(at, hi); err != nil {
					t.Fatal(err)
				}
			} else {
				pieces = append(pieces, piece{at, hi})
			}
			at = hi
		}
		for len(pieces) > 0 {
			n := min(len(pieces), 1+r.IntN(6))
			var wg sync.WaitGroup
			for _, p := range pieces[:n] {
				for i := p.lo; i < p.hi; i++ {
					want[i] = byte(r.Uint32())
				}
				wg.Add(1)
				go func() {
					defer wg.Done()
					put := d.Write
					if p.lo%3 == 0 {
						put = d.WriteView
					}
					if err := put(want[p.lo:p.hi], p.lo); err != nil {
						t.Error(err)
					}
				}()
			}
			wg.Wait()
			pieces = pieces[n:]
		}
		if front > 0 && r.IntN(2) == 0 {
			for i := range front {
				want[i] = byte(r.Uint32())
			}
			if err := d.Write(want[:front], 0); err != nil {
				t.Fatal(err)
			}
		}
		if err := d.Finish(size); err != nil {
			t.Fatal(err)
		}
		if m.shown {
			t.Fatal("the object is visible before it is published")
		}
		if err := d.Publish(); err != nil {
			t.Fatal(err)
		}
		d.Drop()
		if !bytes.Equal(m.object, want) || m.aborted != 0 {
			t.Fatalf("round %d: %d bytes in parts of %d differ (aborted %d)", round, size, part, m.aborted)
		}
	}
}

// Views are sent without a copy.
func TestViews(t *testing.T) {
	data := make([]byte, 100_000)
	for i := range data {
		data[i] = byte(i % 251)
	}
	m := &memory{parts: map[int][]byte{}, fail: -1}
	d := New(context.Background(), m, 1000, 3)
	for off := 0; off < len(data); off += 2500 {
		if err := d.WriteView(data[off:off+2500], int64(off)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(d.Finish(int64(len(data))), d.Publish()); err != nil || !bytes.Equal(m.object, data) {
		t.Fatalf("%v, %d bytes", err, len(m.object))
	}
	lo, hi := uintptr(unsafe.Pointer(&data[0])), uintptr(unsafe.Pointer(&data[len(data)-1]))
	for _, p := range m.places {
		if at := uintptr(unsafe.Pointer(&p[0])); at < lo || at > hi {
			t.Errorf("%d bytes were copied", len(p))
		}
	}
	if len(d.free) > 0 {
		t.Errorf("%d buffers were allocated", len(d.free))
	}
}

// The number of parts in flight is limited. Memory is limited to these and the incomplete parts, independent of
// the object's size.
func TestBounded(t *testing.T) {
	m := &memory{parts: map[int][]byte{}, fail: -1}
	d := New(context.Background(), m, 1000, 3)
	for off := int64(1000); off < 300_000; off += 100 {
		if err := d.Write(make([]byte, 100), off); err != nil {
			t.Fatal(err)
		}
		d.mu.Lock()
		open, free := len(d.open), len(d.free)
		d.mu.Unlock()
		if open > 2 || free > 5 {
			t.Fatalf("%d incomplete parts, %d free buffers", open, free)
		}
	}
	if err := d.Finish(300_000); err != nil {
		t.Fatal(err)
	}
	if n := m.most.Load(); n > 3 {
		t.Fatalf("%d parts in flight", n)
	}
	d.Drop()
	d.Drop()
	if m.aborted != 1 || m.shown {
		t.Fatalf("aborted %d times", m.aborted)
	}
}

// A failed part ends the draft with its error, and nothing is published.
func TestFailure(t *testing.T) {
	m := &memory{parts: map[int][]byte{}, fail: 7}
	d := New(context.Background(), m, 100, 2)
	var err error
	for off := int64(0); off < 100_000 && err == nil; off += 50 {
		err = d.Write(make([]byte, 50), off)
	}
	if err == nil {
		err = d.Finish(100_000)
	}
	if !errors.Is(err, errs.ErrIO) {
		t.Fatal(err)
	}
	if err := d.Publish(); !errors.Is(err, errs.ErrIO) {
		t.Fatal(err)
	}
	d.Drop()
	if m.aborted != 1 || m.shown {
		t.Fatal("not aborted, or published")
	}
}

// After a cancellation, every call of the draft fails.
func TestCancel(t *testing.T) {
	ctx, cancel := context.WithCancelCause(context.Background())
	m := &memory{parts: map[int][]byte{}, fail: -1}
	d := New(ctx, m, 10, 1)
	if err := d.Write(make([]byte, 5), 0); err != nil {
		t.Fatal(err)
	}
	cancel(errs.ErrCancelled)
	if err := d.Write(make([]byte, 1), 5); !errors.Is(err, errs.ErrCancelled) {
		t.Fatal(err)
	}
	if err := d.Finish(6); !errors.Is(err, errs.ErrCancelled) {
		t.Fatal(err)
	}
	if err := d.Publish(); !errors.Is(err, errs.ErrCancelled) {
		t.Fatal(err)
	}
	d.Drop()
	if m.aborted != 1 {
		t.Fatal("not aborted")
	}
}
