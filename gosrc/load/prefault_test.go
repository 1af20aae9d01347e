package load

import (
	"testing"

	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
)

// Prefaulting ends after the owner has released the mapping.
func TestPrefaultEnds(t *testing.T) {
	path, _ := write(t, "a", []int64{3 << 20}, []int64{7})
	m := opened(t, Spec{URIs: []string{path}})
	l, err := m.Start(nil, Options{})
	if err != nil {
		t.Fatal(err)
	}
	<-l.Job().Done()
	for i := range l.Len() {
		if mem, _, _, ok := l.Take(i); ok {
			mem.Release()
		}
	}
	l.Close()
	m.Close()
	if left := spawntest.Left(); len(left) > 0 {
		t.Errorf("%v still run", left)
	}
	if n := mappings(t, path); n != 0 {
		t.Errorf("%d mappings are left", n)
	}
}
