package load

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
	"github.com/overwire/overwire/gosrc/plan"
)

// write writes a plain safetensors file with U8 tensors t0, t1, ... of the given shapes. It returns the path and the
// tensors' bytes.
func write(t testing.TB, name string, shapes ...[]int64) (string, [][]byte) {
	t.Helper()
	var entries []string
	var data []byte
	var all [][]byte
	for i, s := range shapes {
		n := int64(1)
		for _, d := range s {
			n *= d
		}
		b := make([]byte, n)
		for k := range b {
			b[k] = byte(k*7 + i*31 + k>>8)
		}
		all = append(all, b)
		entries = append(entries, fmt.Sprintf(`"%s.t%d":{"dtype":"U8","shape":%s,"data_offsets":[%d,%d]}`,
			name, i, strings.ReplaceAll(fmt.Sprint(s), " ", ","), len(data), len(data)+len(b)))
		data = append(data, b...)
	}
	h := "{" + strings.Join(entries, ",") + "}"
	file := binary.LittleEndian.AppendUint64(nil, uint64(len(h)))
	path := filepath.Join(t.TempDir(), name+".safetensors")
	if err := os.WriteFile(path, append(append(file, h...), data...), 0o600); err != nil {
		t.Fatal(err)
	}
	return path, all
}

func opened(t testing.TB, spec Spec) *Model {
	t.Helper()
	m, err := Open(context.Background(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

// ended loads all tensors of m, waits for the end, and returns the load and its report.
func ended(t testing.TB, m *Model, opt Options) (*Loading, Report) {
	t.Helper()
	l, err := m.Start(nil, opt)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Job().Wait(-1); err != nil {
		t.Fatalf("%+v: %v", opt, err)
	}
	var rep Report
	if b, err := l.Job().Report(); err != nil || json.Unmarshal(b, &rep) != nil {
		t.Fatal(err)
	}
	return l, rep
}

// settled waits until none of the engine's goroutines is left.
func settled(t *testing.T) {
	t.Helper()
	if n := spawntest.Left(); len(n) != 0 {
		t.Errorf("still running: %v", n)
	}
}

// Tensors of several files load correctly, mapped or read, and stay valid after the model is closed.
func TestLoad(t *testing.T) {
	p1, b1 := write(t, "a", []int64{3, 5}, []int64{}, []int64{0, 4}, []int64{700, 1000})
	p2, b2 := write(t, "b", []int64{2, 2, 2})
	want := append(append([][]byte{}, b1...), b2...)
	for _, mapped := range []bool{true, false} {
		t.Run(fmt.Sprintf("map=%v", mapped), func(t *testing.T) {
			m := opened(t, Spec{URIs: []string{p1, p2}, Map: &mapped})
			l, err := m.Start(nil, Options{})
			if err != nil {
				t.Fatal(err)
			}
			m.Close()
			if _, err := l.Job().Wait(-1); err != nil {
				t.Fatal(err)
			}
			for i := range want {
				mem, shape, _, ok := l.Take(i)
				if !ok || !bytes.Equal(mem.Slice(), want[i]) ||
					fmt.Sprint(shape) != fmt.Sprint(l.model.ix.Tensors[i].Shape) {
					t.Fatalf("tensor %d: %v %v", i, ok, shape)
				}
				if _, _, _, ok := l.Take(i); ok {
					t.Errorf("tensor %d taken twice", i)
				}
				mem.Release()
			}
			l.Close()
		})
	}
	settled(t)
}

func TestSlicesAndDestinations(t *testing.T) {
	p, b := write(t, "a", []int64{40, 50})
	for _, mapped := range []bool{true, false} {
		m := opened(t, Spec{URIs: []string{p}, Map: &mapped})
		dest := make([]byte, 2000)
		var pin runtime.Pinner
		pin.Pin(&dest[0])
		l, err := m.Start([]Request{
			{Tensor: 0, Lo0: 3, Hi0: 5, Hi1: -1},
			{Tensor: 0, Hi0: -1, Lo1: 10, Hi1: 12},
			{Tensor: 0, Hi0: -1, Hi1: -1, Dest: uintptr(unsafe.Pointer(&dest[0]))},
			{Tensor: 0, Lo0: 7, Hi0: 7, Hi1: -1},
		}, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.Job().Wait(-1); err != nil {
			t.Fatal(err)
		}
		rows, s0, _, _ := l.Take(0)
		cols, s1, _, _ := l.Take(1)
		var want []byte
		for r := range 40 {
			want = append(want, b[0][r*50+10:r*50+12]...)
		}
		if !bytes.Equal(rows.Slice(), b[0][150:250]) || !bytes.Equal(cols.Slice(), want) || !bytes.Equal(dest, b[0]) {
			t.Errorf("map=%v: wrong bytes", mapped)
		}
		if fmt.Sprint(s0, s1) != "[2 50] [40 2]" {
			t.Errorf("shapes %v %v", s0, s1)
		}
		if _, _, _, ok := l.Take(2); ok {
			t.Error("Take returned memory for a request with a destination")
		}
		rows.Release()
		cols.Release()
		l.Close()
		pin.Unpin()
	}
	settled(t)
}

func TestStartRefuses(t *testing.T) {
	p, _ := write(t, "a", []int64{4, 5}, []int64{})
	m := opened(t, Spec{URIs: []string{p}})
	for _, q := range []Request{
		{Tensor: 2, Hi0: -1, Hi1: -1}, {Tensor: -1, Hi0: -1, Hi1: -1},
		{Tensor: 0, Lo0: 2, Hi0: 1, Hi1: -1}, {Tensor: 0, Hi0: 5, Hi1: -1}, {Tensor: 0, Hi0: -1, Lo1: -1, Hi1: 3},
		{Tensor: 1, Lo0: 1, Hi0: 1, Hi1: -1},
	} {
		if _, err := m.Start([]Request{q}, Options{}); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%+v: %v, want ErrArgument", q, err)
		}
	}
	for _, name := range []string{"cuda:", "cuda:-1", "cuda:x", "cpu:one"} {
		if _, err := m.Start(nil, Options{Device: name}); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("device %q: %v", name, err)
		}
	}
	if _, err := m.Start(nil, Options{Device: "cuda:4096"}); !errors.Is(err, errs.ErrDevice) &&
		!errors.Is(err, errs.ErrNotSupported) {
		t.Errorf("cuda:4096: %v", err)
	}
	m.Close()
	if _, err := m.Start(nil, Options{}); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("closed: %v", err)
	}
	for _, uris := range [][]string{nil, {filepath.Join(t.TempDir(), "no")}, {"gopher://x"}} {
		if _, err := Open(context.Background(), Spec{URIs: uris}); err == nil {
			t.Errorf("%q was opened", uris)
		}
	}
}

// Ready returns every request once, in order of arrival, and then the end.
func TestReady(t *testing.T) {
	var shapes [][]int64
	for i := range 50 {
		shapes = append(shapes, []int64{int64(i * 1000)}) // more bytes than Start loads on the calling thread
	}
	p, _ := write(t, "a", shapes...)
	no := false
	m := opened(t, Spec{URIs: []string{p}, Map: &no})
	l, err := m.Start(nil, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	seen := map[int]bool{}
	for {
		reqs, more := l.Ready(7, time.Minute)
		for _, i := range reqs {
			if seen[i] || len(reqs) > 7 {
				t.Fatal("a request was returned twice, or too many requests")
			}
			seen[i] = true
		}
		if !more {
			break
		}
	}
	if len(seen) != 50 {
		t.Errorf("Ready returned %d of 50 requests", len(seen))
	}
}

// A load that is closed at any moment ends its workers, and returns no memory afterwards.
func TestCloseAtAnyMoment(t *testing.T) {
	p, _ := write(t, "a", []int64{3000, 1000}, []int64{1000})
	no := false
	m := opened(t, Spec{URIs: []string{p}, Map: &no})
	for i := range 60 {
		l, err := m.Start(nil, Options{})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(i*20) * time.Microsecond)
		l.Close()
		l.Close()
		if _, err := l.Job().Wait(-1); err != nil && !errors.Is(err, errs.ErrCancelled) {
			t.Fatal(err)
		}
		if _, _, _, ok := l.Take(0); ok {
			t.Fatal("Take returned memory from a closed load")
		}
	}
	settled(t)
}

// If a file is truncated while it is open, the load gives a typed error that names the file.
func TestTruncatedWhileOpen(t *testing.T) {
	for _, mapped := range []bool{true, false} {
		p, _ := write(t, "a", []int64{300_000}, []int64{300_000})
		m := opened(t, Spec{URIs: []string{p}, Map: &mapped})
		if err := os.Truncate(p, 200_000); err != nil {
			t.Fatal(err)
		}
		l, err := m.Start([]Request{{Tensor: 1, Hi0: plan.Whole, Hi1: plan.Whole}}, Options{})
		if err == nil {
			_, err = l.Job().Wait(-1)
			l.Close()
		}
		var at *errs.At
		if !errors.Is(err, errs.ErrCorrupt) || !errors.As(err, &at) || at.Source != p || (!mapped && at.Tensor != "a.t1") {
			t.Errorf("map=%v: %v", mapped, err)
		}
	}
	settled(t)
}
