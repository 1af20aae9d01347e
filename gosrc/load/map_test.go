package load

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/plan"
)

// mappings counts the mappings of a file in this process.
func mappings(t *testing.T, path string) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Skip(err)
	}
	return strings.Count(string(b), path)
}

// Tensors that are loaded one by one share one mapping, however many they are;
// one that is loaded again has bytes of its own. All go when the last does.
func TestOneMapping(t *testing.T) {
	shapes := make([][]int64, 50)
	for i := range shapes {
		shapes[i] = []int64{int64(300 * i)}
	}
	shapes[7] = []int64{200_000}
	path, want := write(t, "a", shapes...)
	m := opened(t, Spec{URIs: []string{path}})
	take := func(i int) *Loading {
		l, err := m.Start([]Request{{Tensor: int64(i), Hi0: plan.Whole, Hi1: plan.Whole}}, Options{})
		if err != nil {
			t.Fatal(err)
		}
		<-l.Job().Done()
		return l
	}
	var all []*Loading
	for i := range shapes {
		all = append(all, take(i))
	}
	if n := mappings(t, path); n != 1 {
		t.Errorf("%d mappings for %d tensors", n, len(all))
	}
	first, _, _, _ := all[7].Take(0)
	clear(first.Slice())
	again, _, _, _ := take(7).Take(0)
	if !bytes.Equal(again.Slice(), want[7]) {
		t.Error("a tensor that was loaded again has another owner's changes")
	}
	again.Release()
	settled(t) // prefaulting holds it, too
	if n := mappings(t, path); n != 1 {
		t.Errorf("%d mappings after the second was released", n)
	}
	// Who goes takes his changes with him, and no one else's bytes.
	page := first.Slice()[100_000:]
	first.Release()
	if page[0] != want[7][100_000] {
		t.Error("the changed pages are still there")
	}
	for i, l := range all {
		if i == 7 {
			continue
		}
		if mem, _, _, ok := l.Take(0); i > 0 && (!ok || !bytes.Equal(mem.Slice(), want[i])) {
			t.Errorf("tensor %d differs", i)
		} else {
			mem.Release()
		}
	}
	settled(t)
	if n := mappings(t, path); n != 1 {
		t.Errorf("%d mappings while the model is open", n)
	}
	m.Close()
	if n := mappings(t, path); n != 0 {
		t.Errorf("%d mappings when everything is gone", n)
	}
}
