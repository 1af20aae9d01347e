package load

import (
	"context"
	"testing"

	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/source"
)

// A slow is a file on a possibly slow file system. Reads wait until mayAnswer is closed.
type slow struct {
	source.Source
	mayAnswer chan struct{}
}

func (s *slow) Facts() source.Facts {
	f := s.Source.Facts()
	f.Quick = false
	return f
}

func (s *slow) ReadAt(ctx context.Context, p []byte, off int64) error {
	<-s.mayAnswer
	return s.Source.ReadAt(ctx, p, off)
}

// A small load from a local file is done when Start returns. Start does not wait for larger loads or for slow file
// systems.
func TestShortLoads(t *testing.T) {
	no := false
	for _, c := range []struct {
		sizes   []int64
		mayWait bool
		isShort bool
	}{
		{[]int64{0}, false, true},
		{[]int64{1000, 70_000}, false, true},
		{[]int64{1 << 19, 1 << 19}, false, true},
		{[]int64{1000}, true, false},
	} {
		var shapes [][]int64
		for _, n := range c.sizes {
			shapes = append(shapes, []int64{n})
		}
		path, want := write(t, "a", shapes...)
		m := opened(t, Spec{URIs: []string{path}, Map: &no})
		mayAnswer := make(chan struct{})
		if c.mayWait {
			m.srcs[0] = &slow{m.srcs[0], mayAnswer}
		}
		l, err := m.Start(nil, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if isOver := job.IsClosed(l.Job().Done()); isOver != c.isShort {
			t.Errorf("%+v: had ended when Start returned: %v", c, isOver)
		}
		close(mayAnswer)
		if _, err := l.Job().Wait(-1); err != nil {
			t.Fatal(err)
		}
		for i, b := range want {
			mem, _, _, ok := l.Take(i)
			if !ok || len(b) > 0 && string(mem.Slice()) != string(b) {
				t.Errorf("%+v: tensor %d: wrong bytes, or none", c, i)
			}
			mem.Release()
		}
	}
	settled(t)
}

// A small slice is not a short load if it needs a large read: a column spans all rows, and a row may be in a chunk of
// many rows.
func TestShortSlices(t *testing.T) {
	no := false
	path, _ := write(t, "a", []int64{1 << 12, 1 << 10}, []int64{16, 16})
	plain := opened(t, Spec{URIs: []string{path}, Map: &no})
	path, _ = smaller(t)
	chunked := opened(t, Spec{URIs: []string{path}})
	number := map[string]int64{}
	for i := range chunked.ix.Tensors {
		number[chunked.ix.Tensors[i].Name] = int64(i)
	}
	large, little := number["a"], number["f"]
	for _, c := range []struct {
		model   *Model
		request Request
		isShort bool
	}{
		{plain, Request{Tensor: 0, Hi0: 16, Hi1: plan.Whole}, true},
		{plain, Request{Tensor: 0, Lo0: 7, Hi0: 8, Lo1: 5, Hi1: 9}, true},
		{plain, Request{Tensor: 0, Hi0: plan.Whole, Hi1: 1}, false},
		{plain, Request{Tensor: 1, Hi0: plan.Whole, Hi1: 1}, true},
		{chunked, Request{Tensor: large, Hi0: 1, Hi1: plan.Whole}, false},
		{chunked, Request{Tensor: little, Hi0: plan.Whole, Hi1: 1}, true},
		{chunked, Request{Tensor: little, Hi0: plan.Whole, Hi1: plan.Whole}, true},
	} {
		wants, err := plan.Check(c.model.ix, []Request{c.request})
		if err != nil {
			t.Fatal(err)
		}
		if got := newLoading(c.model, Target{}, wants).isShort(); got != c.isShort {
			t.Errorf("%+v of %s: short %v", c.request, c.model.srcs[0].URI(), got)
		}
	}
}
