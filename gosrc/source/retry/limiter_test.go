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

// The limit rises while throughput follows, and falls back when it does not.
func TestAdapts(t *testing.T) {
	l := holdLimiter("", 64)
	rate := func() float64 { return float64(min(l.limit, 20)) } // 20 saturate the link
	for range 200 {
		l.adaptLimit(rate())
	}
	if l.limit < 18 || l.limit > 40 {
		t.Errorf("%d open where 20 are enough", l.limit)
	}
}

// A link with fluctuating throughput is not mistaken for one that more connections fill, however long a load takes.
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
			t.Errorf("%d open where 20 are enough", l.limit)
		}
	}
}

// The earlier throughput of an overloaded store is not a measure of its current one.
func TestAdaptsAgain(t *testing.T) {
	l := holdLimiter("", 64)
	for range 100 {
		l.adaptLimit(float64(l.limit))
	}
	l.halveLimit()
	if l.limit != 32 {
		t.Errorf("%d open", l.limit)
	}
	for range 30 {
		l.adaptLimit(float64(l.limit))
	}
	if l.limit != 64 {
		t.Errorf("%d open after a while", l.limit)
	}
}

// If a store gives each connection little, more are opened until there are enough. The arriving bytes decide that, not
// the finished ranges.
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
		t.Errorf("%d at once", n)
	}
	close(stop)
	wg.Wait()
}

// A drip gives a little at a time.
type drip struct{ r io.Reader }

func (d *drip) Read(p []byte) (int, error) {
	time.Sleep(10 * time.Millisecond)
	return d.r.Read(p[:min(len(p), 1<<10)])
}
