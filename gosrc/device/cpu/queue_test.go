package cpu

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/tensor"
)

var _ device.Queue = (*Queue)(nil)

// A slot has one owner at a time and slots do not overlap. Close waits for all slots and releases the memory.
func TestQueueSlots(t *testing.T) {
	q, err := NewQueue(4, 100)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for g := range 16 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for range 200 {
				s, err := q.Get(context.Background())
				if err != nil {
					t.Error(err)
					return
				}
				b := s.Memory()
				if len(b) < 100 || s.ViewMirror() != nil {
					t.Errorf("a slot of %d bytes, mirrored at %v", len(b), s.ViewMirror())
				}
				for i := range b {
					b[i] = byte(g)
				}
				for _, x := range b {
					if x != byte(g) {
						t.Error("a slot has two owners")
					}
				}
				q.Put(s)
			}
		}()
	}
	wg.Wait()
	if q.PinnedBytes() < 400 || q.Asynchronous() {
		t.Errorf("%d bytes, asynchronous: %v", q.PinnedBytes(), q.Asynchronous())
	}
	q.Close()
	// The slots are so large that no other mapping will fill the whole gap afterwards.
	if q, err = NewQueue(4, 64<<20); err != nil {
		t.Fatal(err)
	}
	last, err := q.Get(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	closed := make(chan struct{})
	go func() { defer close(closed); q.Close() }()
	select {
	case <-closed:
		t.Fatal("Close returned while a slot was in use")
	case <-time.After(20 * time.Millisecond):
	}
	last.Memory()[0] = 1
	all := q.memory.Slice()
	q.Put(last)
	<-closed
	if err := unix.Msync(all, unix.MS_ASYNC); !errors.Is(err, unix.ENOMEM) {
		t.Errorf("the memory was not released: %v", err)
	}
}

func TestQueueGetEndsWithItsContext(t *testing.T) {
	q, err := NewQueue(1, 10)
	if err != nil {
		t.Fatal(err)
	}
	s, _ := q.Get(context.Background())
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(context.Background())
	time.AfterFunc(10*time.Millisecond, func() { cancel(cause) })
	if _, err := q.Get(ctx); !errors.Is(err, cause) {
		t.Errorf("Get returned %v, want the cause", err)
	}
	q.Put(s)
	defer func() {
		if recover() == nil {
			t.Error("a slot was returned twice without a panic")
		}
	}()
	q.Put(s)
}

// Tasks of a piece are decoded from the slot or from a view, which ends with Submit. After the first error, all later
// tasks get that error. The slot is always returned.
func TestQueueSubmit(t *testing.T) {
	q, err := NewQueue(1, 64)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	raw := func(src, n uint32, dst *byte) device.DecodeTask {
		return device.DecodeTask{Chunk: tensor.Chunk{Stored: n, Logical: n, Codec: tensor.CodecRaw}, Src: src,
			Dst: unsafe.Pointer(dst)}
	}
	submit := func(view []byte, tasks ...device.DecodeTask) (failures []error) {
		s, err := q.Get(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		copy(s.Memory(), "0123456789")
		if view != nil {
			s.View(view)
		}
		if err := q.Submit(s, 10, tasks, func(i int, err error) {
			if i != len(failures) {
				t.Errorf("task %d was reported as number %d", i, len(failures))
			}
			failures = append(failures, err)
		}); err != nil {
			t.Fatal(err)
		}
		return failures
	}
	mem := make([]byte, 8)
	if failures := submit(nil, raw(2, 3, &mem[0]), raw(7, 2, &mem[4])); failures[0] != nil || failures[1] != nil ||
		string(mem) != "234\x0078\x00\x00" {
		t.Errorf("%v, %q", failures, mem)
	}
	if failures := submit([]byte("abcdefghij"), raw(2, 3, &mem[0])); failures[0] != nil || string(mem[:3]) != "cde" {
		t.Errorf("from a view: %v, %q", failures, mem)
	}
	bad := raw(0, 3, &mem[0])
	bad.Chunk.Logical = 4
	failures := submit(nil, raw(5, 1, &mem[0]), bad, raw(0, 1, &mem[1]))
	if len(failures) != 3 || failures[0] != nil || failures[1] == nil || failures[2] != failures[1] || mem[0] != '5' ||
		mem[1] == '0' {
		t.Errorf("%v, %q", failures, mem)
	}
}
