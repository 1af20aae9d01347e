package load

import (
	"context"
	"testing"

	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/source"
)

// A slow is a file on a network file system: it does not answer before it may.
type slow struct {
	source.Source
	mayAnswer chan struct{}
}

func (s *slow) Facts() source.Facts {
	f := s.Source.Facts()
	f.Remote = true
	return f
}

func (s *slow) ReadAt(ctx context.Context, p []byte, off int64) error {
	<-s.mayAnswer
	return s.Source.ReadAt(ctx, p, off)
}

// What one worker would read of a local file is there when Start returns. Start waits for nothing that
// may take long: for more, or for a server.
func TestShortLoads(t *testing.T) {
	no := false
	for _, c := range []struct {
		sizes    []int64
		isRemote bool
		isShort  bool
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
		if c.isRemote {
			m.srcs[0] = &slow{m.srcs[0], mayAnswer}
		}
		l, err := m.Start(nil, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if isOver := job.IsClosed(l.Job().Done()); isOver != c.isShort {
			t.Errorf("%+v: over when Start returns: %v", c, isOver)
		}
		close(mayAnswer)
		if _, err := l.Job().Wait(-1); err != nil {
			t.Fatal(err)
		}
		for i, b := range want {
			mem, _, _, ok := l.Take(i)
			if !ok || len(b) > 0 && string(mem.Slice()) != string(b) {
				t.Errorf("%+v: tensor %d: other bytes, or none", c, i)
			}
			mem.Release()
		}
	}
	settled(t)
}
