package load

import (
	"bytes"
	"fmt"
	"sync"
	"testing"

	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// Attach and Start may run at the same time, because threads of a program may open and load the same model. The race
// detector checks this.
func TestAttachDuringStart(t *testing.T) {
	off := false
	spec, want := Spec{Map: &off}, [][]byte{}
	for i := range 100 {
		path, all := write(t, fmt.Sprint("file", i), []int64{64}, []int64{3, 5})
		spec.URIs, want = append(spec.URIs, path), append(want, all...)
	}
	for range 5 {
		s, err := NewPreloaded(opened(t, spec), Options{})
		if err != nil {
			t.Fatal(err)
		}
		ids, _, _ := s.Model().FileIdentities()
		m := opened(t, spec)
		var wg sync.WaitGroup
		wg.Add(1)
		begun := make(chan struct{})
		spawn.Go("test join", func() {
			defer wg.Done()
			for i := range ids {
				m.Attach(i, s, i, ids[i])
				if i == 0 {
					close(begun)
				}
			}
		})
		<-begun
		l, _ := ended(t, m, Options{})
		wg.Wait()
		for i := range want {
			mem, _, _, ok := l.Take(i)
			if !ok || !bytes.Equal(mem.Slice(), want[i]) {
				t.Fatalf("tensor %d: %v, or wrong bytes", i, ok)
			}
			mem.Release()
		}
		l.Close()
		m.Close()
		s.Drop()
	}
	settled(t)
}
