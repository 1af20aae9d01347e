package face

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/tensor"
)

// Python learns class, place and message from one text.
func TestText(t *testing.T) {
	at := &fault.At{Verb: "decode", Source: "m.safetensors", Tensor: "x", Chunk: 17, Offset: 4096,
		Err: fault.New(fault.ErrCorrupt, "checksum mismatch")}
	for _, c := range []struct {
		err  error
		want string
	}{
		{at, `{"class":"CorruptError","message":"overwire: decode m.safetensors tensor \"x\" chunk 17 @4096: corrupt data: checksum mismatch","source":"m.safetensors","tensor":"x","chunk":17,"offset":4096}`},
		{&fault.At{Verb: "open", Source: "f", Chunk: -1, Offset: -1, Err: fault.ErrNotFound}, `{"class":"NotFoundError","message":"overwire: open f: not found","source":"f"}`},
		{fmt.Errorf("outer: %w", fault.ErrTimeout), `{"class":"DeadlineError","message":"overwire: outer: timed out"}`},
		{errors.New("of no class"), `{"class":"EngineError","message":"overwire: of no class"}`},
	} {
		if got := Text(c.err); got != prefix+c.want {
			t.Errorf("\n got %s\nwant %s", got, prefix+c.want)
		}
	}
}

// A panic is an error, and so is everything after it.
func TestCallGuards(t *testing.T) {
	defer spawn.Heal()
	stderr := os.Stderr
	os.Stderr, _ = os.Open(os.DevNull)
	defer func() { os.Stderr = stderr }()
	if v, err := Call("fine", func() (int, error) { return 3, nil }); v != 3 || err != nil {
		t.Fatal(v, err)
	}
	if v, err := Call("bad", func() (int, error) { return 3, fault.ErrKey }); v != 0 || err == nil {
		t.Fatal(v, err)
	}
	for range 2 {
		v, err := Call("broken", func() (int, error) { panic("ouch") })
		if v != 0 || err == nil || !strings.Contains(err.Error(), "EngineError") || !strings.Contains(err.Error(), "ouch") {
			t.Fatal(v, err)
		}
	}
	if _, err := Call("fine", func() (int, error) { return 3, nil }); err == nil {
		t.Error("a poisoned engine went on")
	}
}

func TestHandlesAreNeverUsedTwice(t *testing.T) {
	tab := newTable[int]("thing")
	var wg sync.WaitGroup
	var seen sync.Map
	for range 8 {
		wg.Add(1)
		spawn.Go("test", func() {
			defer wg.Done()
			for i := range 1000 {
				h := tab.put(i)
				if _, twice := seen.LoadOrStore(h, true); twice || h == 0 {
					t.Errorf("handle %d twice", h)
				}
				if v, err := tab.get(h); v != i || err != nil {
					t.Error(v, err)
				}
				if v, ok := tab.take(h); v != i || !ok {
					t.Error(v, ok)
				}
				if _, err := tab.get(h); !errors.Is(err, fault.ErrArgument) {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// The buffer is read back as table.c reads it.
func TestPackTable(t *testing.T) {
	ix := &tensor.Index{Tensors: []tensor.Tensor{
		{Name: "näme", DType: tensor.BF16, Shape: []int64{3, 1 << 40}, Bytes: 6 << 40, Stored: 5, Source: 2, Alias: -1},
		{Name: "", DType: tensor.U64, Alias: 0},
	}}
	b := PackTable(ix)
	next := func() int64 {
		v := int64(binary.LittleEndian.Uint64(b))
		b = b[8:]
		return v
	}
	text := func(n int64) string {
		s := string(b[:n])
		b = b[n:]
		return s
	}
	n, names := next(), next()
	if n != 2 || names != int64(tensor.NumDTypes)+1 {
		t.Fatal(n, names)
	}
	for d := range names {
		if s := text(next()); s != tensor.DType(d).String() {
			t.Error(d, s)
		}
	}
	for _, want := range ix.Tensors {
		length, code, rank := next(), next(), next()
		var shape []int64
		for range rank {
			shape = append(shape, next())
		}
		bytes, stored, source, alias := next(), next(), next(), next()
		got := fmt.Sprint(text(length), code, shape, bytes, stored, source, alias)
		if w := fmt.Sprint(want.Name, int64(want.DType), want.Shape, want.Bytes, want.Stored, want.Source, want.Alias); got != w {
			t.Errorf("got %s, want %s", got, w)
		}
	}
	if len(b) != 0 {
		t.Error("bytes left:", len(b))
	}
}

func TestRequests(t *testing.T) {
	if _, err := Requests(make([]byte, 47)); !errors.Is(err, fault.ErrArgument) {
		t.Error(err)
	}
	if r, err := Requests(nil); len(r) != 0 || r == nil || err != nil {
		t.Error("no request is not every tensor:", r, err)
	}
	var b []byte
	for _, v := range []int64{7, 4096, 1, 2, 3, -1} {
		b = binary.LittleEndian.AppendUint64(b, uint64(v))
	}
	r, err := Requests(b)
	if err != nil || len(r) != 1 {
		t.Fatal(r, err)
	}
	if q := r[0]; q.Tensor != 7 || q.Dest != 4096 || q.Lo0 != 1 || q.Hi0 != 2 || q.Lo1 != 3 || q.Hi1 != -1 {
		t.Error(q)
	}
}

// plain writes a file with one tensor of n bytes.
func plain(t *testing.T, n int) string {
	t.Helper()
	h := fmt.Sprintf(`{"x":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}`, n, n)
	h += strings.Repeat(" ", (8-len(h)%8)%8)
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(h)))
	b = append(append(b, h...), make([]byte, n)...)
	path := filepath.Join(t.TempDir(), "x.safetensors")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func spec(t *testing.T, paths ...string) string {
	t.Helper()
	b, err := json.Marshal(map[string]any{"uris": paths})
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// idle waits until no goroutine of the engine runs.
func idle(t *testing.T) {
	t.Helper()
	if n := spawn.Left(); len(n) != 0 {
		t.Fatal("still running:", n)
	}
}

// A job that has ended says so even when asked with no time at all.
func TestWaitOfNoTime(t *testing.T) {
	m, err := opened(spec(t, plain(t, 1000)))
	if err != nil {
		t.Fatal(err)
	}
	defer CloseModel(m)
	for range 100 {
		h, err := LoadStart(m, nil, "{}")
		if err != nil {
			t.Fatal(err)
		}
		if done, err := Wait(h, time.Minute); !done || err != nil {
			t.Fatal(done, err)
		}
		if done, err := Wait(h, 0); !done || err != nil {
			t.Fatal("not done after all:", err)
		}
		all, err := TakeAll(h)
		if err != nil || len(all) != 1 || !all[0].OK {
			t.Fatal(all, err)
		}
		all[0].Mem.Release()
		Free(h)
	}
	idle(t)
}

// Preloads: joined by one load, also while they open, and without a trace after
// either was freed at any moment.
func TestPreloadHandOver(t *testing.T) {
	path := plain(t, 1<<20)
	missing := path + ".missing"
	for round := range 50 {
		h, err := PreloadStart(spec(t, path))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := TakeAll(h); !errors.Is(err, fault.ErrArgument) {
			t.Fatal("tensors for one who has not joined it:", err)
		}
		m, err := opened(spec(t, path))
		if err != nil || m == 0 {
			t.Fatal(m, err)
		}
		answer, err := PreloadJoin(m, "{}", time.Minute)
		if err != nil || answer != `{"device":"","notes":null}` {
			t.Fatal(answer, err)
		}
		load, err := LoadStart(m, nil, "{}")
		if err != nil {
			t.Fatal(err)
		}
		if round%2 == 1 { // the caller changes its mind, at any moment
			Free(load)
			CloseModel(m)
			Free(h)
			continue
		}
		for over := false; !over; {
			var landed []Landed
			if landed, over, err = Next(load, 10, time.Second); err != nil {
				t.Fatal(err)
			}
			for _, l := range landed {
				l.Mem.Release()
			}
		}
		CloseModel(m)
		Free(load)
		Free(h)
	}
	h, err := PreloadStart(spec(t, missing))
	if err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(5 * time.Second); ; {
		if _, err := Wait(h, time.Second); errors.Is(err, fault.ErrNotFound) {
			break
		}
		if time.Now().After(end) {
			t.Fatal("a preload of nothing goes on")
		}
	}
	idle(t)
}
