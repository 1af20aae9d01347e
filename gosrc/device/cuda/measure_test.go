package cuda

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
)

// sent submits a piece and waits until it is in new memory, which the caller releases.
func sent(t *testing.T, d *Device, l *queue.Queue, p *piece) []device.Memory {
	t.Helper()
	sizes := make([]int64, len(p.jobs))
	for i := range p.jobs {
		sizes[i] = size(&p.jobs[i])
	}
	mem, err := d.Alloc(sizes)
	if err != nil {
		t.Fatal(err)
	}
	for i := range p.jobs {
		p.jobs[i].Dst = mem[i].Ptr
	}
	s, err := l.Get(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	copy(s.Memory(), p.bytes)
	if err := l.Submit(s, int64(len(p.bytes)), p.jobs, func(_ int, err error) {
		if err != nil {
			t.Error(err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	if err := l.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	return mem
}

// MeasureLink returns a time, and rejects copies that do not fit in a slot.
func TestFloor(t *testing.T) {
	_, l := open(t, 2, 1<<20)
	if took, err := l.MeasureLink(1<<20, 5); err != nil || took <= 0 {
		t.Error(took, err)
	}
	for _, c := range []struct {
		n     int64
		count int
	}{{0, 1}, {1, 0}, {1 << 40, 1}} {
		if _, err := l.MeasureLink(c.n, c.count); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// With TraceTimes, a queue reports each piece's copy and then its decoding, in order and with their bytes. After
// TraceTimes(nil) it reports nothing.
func TestTime(t *testing.T) {
	d, l := open(t, 2, 1<<20)
	r := random(t)
	var coded, raw piece
	coded.coded(weights(r, x16.BF16, 100_000), x16.BF16)
	raw.raw(weights(r, x16.BF16, 100_000))
	type report struct {
		verb       string
		stream     int
		begin, end time.Time
		bytes      int64
	}
	var mu sync.Mutex
	var all []report
	before := time.Now()
	if err := l.TraceTimes(func(verb string, stream int, begin, end time.Time, n int64) {
		mu.Lock()
		defer mu.Unlock()
		all = append(all, report{verb, stream, begin, end, n})
	}); err != nil {
		t.Fatal(err)
	}
	// The times compare two clocks, and the host may be interrupted in between.
	apart := 50*time.Millisecond + time.Since(before)
	send := func(p *piece) {
		for _, m := range sent(t, d, l, p) {
			m.Release()
		}
	}
	send(&coded)
	send(&raw)
	if err := l.TraceTimes(nil); err != nil {
		t.Fatal(err)
	}
	send(&coded)
	mu.Lock()
	defer mu.Unlock()
	if len(all) != 3 || all[0].verb != "copy" || all[1].verb != "decode" || all[2].verb != "copy" {
		t.Fatalf("reported %+v", all)
	}
	if all[0].bytes != int64(len(coded.bytes)) || all[1].bytes != 100_000 || all[2].bytes != 100_000 {
		t.Errorf("bytes: %+v", all)
	}
	if all[0].stream != 0 || all[1].stream < 1 || all[1].begin.Before(all[0].end) {
		t.Errorf("the decoding on stream %d begins before its copy ends: %+v", all[1].stream, all)
	}
	for _, s := range all {
		if s.end.Before(s.begin) || s.begin.Before(before.Add(-apart)) || s.end.After(time.Now().Add(apart)) {
			t.Errorf("%+v is outside its time range", s)
		}
	}
}
