package fed

import (
	"testing"
	"time"
)

// A supplier can never make reads wait longer than a minute after the request, however often it asks for more time.
func TestWaitLimit(t *testing.T) {
	asked := time.Now().Add(-maxWait / 2)
	p := &piece{asked: asked}
	s := &Source{pieces: map[int64]*piece{0: p}}
	for _, d := range []time.Duration{time.Second, 24 * time.Hour, time.Second} {
		s.extendWait(0, time.Now().Add(d))
	}
	if end := s.waitEnd(p, asked); !end.Equal(asked.Add(maxWait)) {
		t.Errorf("reads wait for %v, not %v", end.Sub(asked), maxWait)
	}
}
