package load

import (
	"bytes"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

// From a server without range requests or a Content-Length, a load reads no more than the header says. An endless body
// gives a typed error.
func TestServerThatNeverStops(t *testing.T) {
	path, want := write(t, "a", []int64{300_000}, []int64{700})
	file, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	const endless = 256 << 20 // more than is ever read
	var most atomic.Int64     // most bytes sent in one response of a case
	var answers sync.WaitGroup
	h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		begin, more := file, []byte(nil)
		switch r.URL.Path {
		case "/more.safetensors":
			more = []byte{0}
		case "/endless.safetensors":
			more = bytes.Repeat([]byte{0}, 1<<20)
		case "/junk.safetensors":
			begin, more = nil, bytes.Repeat([]byte{0xff}, 1<<20)
		case "/model.safetensors.index.json":
			begin, more = []byte("{"), bytes.Repeat([]byte(" "), 1<<20)
		case "/cut.safetensors":
			begin = file[:len(file)-1]
		}
		answers.Add(1)
		defer answers.Done()
		for b := begin; len(b) > 0; b = b[min(len(b), 100_000):] {
			_, _ = w.Write(b[:min(len(b), 100_000)])
			w.(http.Flusher).Flush()
		}
		for sent := int64(0); len(more) > 0 && sent < endless; {
			n, err := w.Write(more)
			sent += int64(n)
			for before := most.Load(); before < sent && !most.CompareAndSwap(before, sent); before = most.Load() {
			}
			if err != nil || len(more) == 1 {
				return
			}
		}
	}))
	defer h.Close()
	for _, c := range []struct {
		name    string
		lenient bool
		class   error // nil if the tensors load
		most    int64 // maximum number of bytes that the server may send after the file
	}{
		{"whole.safetensors", false, nil, 0},
		{"more.safetensors", true, nil, 1},
		{"endless.safetensors", true, nil, 32 << 20},
		{"more.safetensors", false, errs.ErrFormat, 1},
		{"endless.safetensors", false, errs.ErrFormat, 32 << 20},
		{"cut.safetensors", false, errs.ErrCorrupt, 0},
		{"junk.safetensors", false, errs.ErrFormat, 32 << 20},
		{"model.safetensors.index.json", false, errs.ErrFormat, 160 << 20},
	} {
		spec := Spec{URIs: []string{h.URL + "/" + c.name}, Lenient: c.lenient}
		m, err := Open(t.Context(), spec)
		if err == nil {
			l, started := m.Start(nil, Options{})
			if started != nil {
				t.Fatal(started)
			}
			_, err = l.Job().Wait(-1)
			for i := range want {
				if mem, _, _, ok := l.Take(i); ok && err == nil && !bytes.Equal(mem.Slice(), want[i]) {
					t.Errorf("%+v: tensor %d differs", c, i)
				} else if ok {
					mem.Release()
				}
			}
			l.Close()
			m.Close()
		}
		if (c.class == nil) != (err == nil) || err != nil && !errors.Is(err, c.class) {
			t.Errorf("%+v: %v", c, err)
		}
		answers.Wait() // a response that continues would count for the next case
		if n := most.Swap(0); n > c.most {
			t.Errorf("%+v: %d bytes were sent", c, n)
		}
	}
	settled(t)
}
