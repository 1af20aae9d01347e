package fed

import (
	"testing"
	"time"
)

// However often a supplier asks for more time, reads wait at most a minute after the request, or after the last piece
// that arrived.
func TestWaitLimit(t *testing.T) {
	asked := time.Now().Add(-maxWait / 2)
	p, arrived := &piece{asked: asked}, &piece{settled: make(chan struct{})}
	s := &Source{pieces: map[int64]*piece{0: p, 1: arrived}}
	expect := func(since time.Time) {
		t.Helper()
		for _, d := range []time.Duration{time.Second, 24 * time.Hour, time.Second} {
			s.extendWait(0, time.Now().Add(d))
		}
		if end := s.waitEnd(p, asked); !end.Equal(since.Add(maxWait)) {
			t.Errorf("reads wait for %v, not %v", end.Sub(since), maxWait)
		}
	}
	expect(asked)
	s.settle(1, []byte{0}, nil)
	expect(s.moved)
}
