package retry

import (
	"bytes"
	"io"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// The limit rises while throughput rises with it, and falls back when it does not.
func TestAdapts(t *testing.T) {
	l := holdLimiter("", 64)
	rate := func() float64 { return float64(min(l.limit, 20)) } // 20 saturate the link
	for range 200 {
		l.adaptLimit(rate())
	}
	if l.limit < 18 || l.limit > 40 {
		t.Errorf("the limit is %d, but 20 are enough", l.limit)
	}
}

// Fluctuating throughput does not raise the limit beyond what fills the link, even in long loads.
func TestAdaptsInNoise(t *testing.T) {
	seed := time.Now().UnixNano()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(uint64(seed), 0))
	for range 20 {
		l := holdLimiter("", 1024)
		for range 2000 { // five minutes
			l.adaptLimit(float64(min(l.limit, 20)) * (0.8 + 0.4*r.Float64()))
		}
		if l.limit < 16 || l.limit > 120 {
			t.Errorf("the limit is %d, but 20 are enough", l.limit)
		}
	}
}

// The throughput before an overload is not used to judge the throughput after it.
func TestAdaptsAgain(t *testing.T) {
	l := holdLimiter("", 64)
	for range 100 {
		l.adaptLimit(float64(l.limit))
	}
	l.halveLimit()
	if l.limit != 32 {
		t.Errorf("the limit is %d, want 32", l.limit)
	}
	for range 30 {
		l.adaptLimit(float64(l.limit))
	}
	if l.limit != 64 {
		t.Errorf("the limit is %d after 30 windows, want 64", l.limit)
	}
}

// If each connection is slow, more are opened. The decision depends on arriving bytes, not on finished ranges.
func TestAdaptsByBytes(t *testing.T) { synctest.Test(t, adaptsByBytes) }

func adaptsByBytes(t *testing.T) {
	s := &store{data: random(64 << 10)}
	s.fault = func(_, _ int64, b []byte) (io.Reader, error) { return &drip{bytes.NewReader(b)}, nil }
	src := New(s, Options{Retries: 8, Timeout: timeout})
	defer src.Close()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range src.opt.Connections {
		wg.Add(1)
		go func() {
			defer wg.Done()
			p := make([]byte, len(s.data))
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := src.ReadAt(t.Context(), p, 0); err != nil {
					t.Error(err)
					return
				}
			}
		}()
	}
	begun := time.Now()
	for src.AtOnce() < src.opt.Connections && time.Since(begun) < time.Minute {
		time.Sleep(10 * time.Millisecond)
	}
	if n := src.AtOnce(); n < src.opt.Connections {
		t.Errorf("the limit is %d", n)
	}
	close(stop)
	wg.Wait()
}

// A drip returns a few bytes at a time.
type drip struct{ r io.Reader }

func (d *drip) Read(p []byte) (int, error) {
	time.Sleep(10 * time.Millisecond)
	return d.r.Read(p[:min(len(p), 1<<10)])
}
