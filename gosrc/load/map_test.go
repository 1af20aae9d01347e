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

// Any number of tensors that are loaded one by one share one mapping. A tensor that is loaded again gets separate
// memory. All mappings end with the last owner.
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
	settled(t) // prefaulting also holds the mapping
	if n := mappings(t, path); n != 1 {
		t.Errorf("%d mappings after the second was released", n)
	}
	// Releasing a tensor discards its changes, and does not affect other tensors.
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
		t.Errorf("%d mappings after the model was closed and all tensors were released", n)
	}
}

// A file has few mappings, no matter how often its tensors and rows are loaded, and each owner has separate memory.
// Different rows share one mapping. When there are many private mappings, a row that is loaded again is copied.
func TestFewMappings(t *testing.T) {
	path, want := write(t, "a", []int64{3000, 64}, []int64{100_000})
	m := opened(t, Spec{URIs: []string{path}})
	var all [][]byte
	take := func(r Request) []byte {
		l, err := m.Start([]Request{r}, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.Job().Wait(-1); err != nil {
			t.Fatal(err)
		}
		mem, _, _, ok := l.Take(0)
		if !ok {
			t.Fatal("nothing landed")
		}
		t.Cleanup(mem.Release)
		all = append(all, mem.Slice())
		return mem.Slice()
	}
	row := func(i int64) Request { return Request{Tensor: 0, Lo0: i, Hi0: i + 1, Hi1: plan.Whole} }
	for i := range int64(3000) {
		i = i * 1009 % 3000
		if b := take(row(i)); !bytes.Equal(b, want[0][i*64:][:64]) {
			t.Fatalf("row %d is %v", i, b)
		}
	}
	if n := mappings(t, path); n != 1 {
		t.Errorf("%d mappings for rows", n)
	}
	for i := range int64(100) {
		clear(take(row(i)))
	}
	for range ownMappings + 20 {
		take(Request{Tensor: 1, Hi0: plan.Whole, Hi1: plan.Whole})
	}
	if n := mappings(t, path); n > ownMappings+1 {
		t.Errorf("%d mappings for one tensor", n)
	}
	for _, b := range all[len(all)-30:] {
		if !bytes.Equal(b, want[1]) {
			t.Fatal("a tensor differs")
		}
		clear(b)
	}
	if b := take(row(7)); !bytes.Equal(b, want[0][7*64:][:64]) {
		t.Error("a row has another owner's changes")
	}
}

// A load of little data does not map the file.
func TestSmallLoadsAreCopied(t *testing.T) {
	path, want := write(t, "a", []int64{300}, []int64{500})
	for range 3 {
		m := opened(t, Spec{URIs: []string{path}})
		l, err := m.Start(nil, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.Job().Wait(-1); err != nil {
			t.Fatal(err)
		}
		if n := mappings(t, path); n != 0 {
			t.Errorf("%d mappings", n)
		}
		for i := range want {
			if mem, _, _, ok := l.Take(i); !ok || !bytes.Equal(mem.Slice(), want[i]) {
				t.Errorf("tensor %d differs", i)
			} else {
				mem.Release()
			}
		}
		if b, _, _, _ := l.job.Progress(); b != 800 {
			t.Errorf("%d bytes done", b)
		}
	}
}

// A range can be added only once, and merges with adjacent ranges.
func TestSpans(t *testing.T) {
	var s spans
	for i, c := range []struct {
		from, to int64
		added    bool
		left     int
	}{
		{10, 20, true, 1}, {10, 20, false, 1}, {19, 30, false, 1}, {5, 11, false, 1}, {0, 40, false, 1},
		{12, 13, false, 1},
		{30, 40, true, 2}, {20, 30, true, 1}, {0, 5, true, 2}, {5, 10, true, 1}, {50, 51, true, 2}, {40, 49, true, 2},
		{49, 50, true, 1},
	} {
		if s.addRange(c.from, c.to) != c.added || len(s) != c.left {
			t.Fatalf("%d: %v", i, s)
		}
	}
}
