package parts

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

// A slow store sends a part until its context ends, and then reads its bytes again.
type slow struct {
	memory
	begun   chan struct{}
	reading atomic.Int64
}

func (s *slow) Part(ctx context.Context, _ int, p [][]byte) error {
	s.reading.Add(1)
	defer s.reading.Add(-1)
	s.begun <- struct{}{}
	<-ctx.Done()
	for _, one := range p {
		_ = one[len(one)-1]
	}
	return context.Cause(ctx)
}

// After StopSends returns, nothing reads the bytes of WriteView, while Drop may take long.
func TestStopSends(t *testing.T) {
	s := &slow{begun: make(chan struct{}, 2)}
	d := New(t.Context(), s, 100, 2)
	for k := range 2 {
		if err := d.WriteView(make([]byte, 100), int64(k+1)*100); err != nil {
			t.Fatal(err)
		}
		<-s.begun
	}
	d.StopSends()
	if n := s.reading.Load(); n != 0 {
		t.Fatalf("%d parts are still read", n)
	}
	if err := d.WriteView(make([]byte, 100), 300); !errors.Is(err, errs.ErrCancelled) {
		t.Fatal(err)
	}
	d.Drop()
	d.Drop()
	if s.aborted != 1 {
		t.Fatalf("aborted %d times", s.aborted)
	}
}
