package cpu

import (
	"bytes"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/device"
)

// Small tensors reuse arenas that were freed. The arenas are zeroed and have no other holder. Only a limited number of
// arenas is cached.
func TestArenas(t *testing.T) {
	sizes := []int64{1, 100, 4096, leastArena - Align, leastArena - Align + 1, mostArena/2 + 5, small - 1}
	held := map[unsafe.Pointer]device.Memory{}
	for round := range 300 {
		n := sizes[round%len(sizes)]
		mem, err := Alloc([]int64{n, 7})
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range mem {
			if len(bytes.Trim(m.Slice(), "\x00")) != 0 || uintptr(m.Ptr)%Align != 0 {
				t.Fatalf("%d bytes at %p: not zeroed, or not aligned", m.Bytes, m.Ptr)
			}
			if _, isHeld := held[m.Ptr]; isHeld {
				t.Fatalf("%p has two holders", m.Ptr)
			}
			copy(m.Slice(), bytes.Repeat([]byte{0xff}, int(m.Bytes)))
			held[m.Ptr] = m
		}
		if round%3 == 2 {
			for at, m := range held {
				delete(held, at)
				m.Release()
			}
		}
	}
	var many []device.Memory
	for range 4 * mostArena / leastArena {
		mem, err := Alloc([]int64{100})
		if err != nil {
			t.Fatal(err)
		}
		many = append(many, mem...)
	}
	for _, m := range many {
		m.Release()
	}
	kept := 0
	for _, m := range many {
		if unix.Msync(unsafe.Slice((*byte)(m.Ptr), leastArena), unix.MS_ASYNC) == nil {
			kept++
		}
	}
	if kept > mostArena/leastArena {
		t.Errorf("%d of %d arenas were kept, more than %d bytes", kept, len(many), mostArena)
	}
}

// Each arena has one holder even if threads allocate and free at the same time.
func TestArenasOfThreads(t *testing.T) {
	failed := make(chan error, 4)
	end := time.Now().Add(200 * time.Millisecond)
	for g := range 4 {
		go func() {
			for n := int64(1); time.Now().Before(end); n = (n*5 + int64(g)) % 30_000 {
				mem, err := Alloc([]int64{n + 1})
				if err != nil {
					failed <- err
					return
				}
				b := mem[0].Slice()
				for i := range b {
					b[i] = byte(g)
				}
				for _, x := range b {
					if x != byte(g) {
						t.Error("an arena has two holders")
					}
				}
				mem[0].Release()
			}
			failed <- nil
		}()
	}
	for range 4 {
		if err := <-failed; err != nil {
			t.Error(err)
		}
	}
}
