package binding

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/avx/avxtest"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/tensor"
)

// Guard returns to C with cleared vector registers.
func TestGuardClears(t *testing.T) {
	avxtest.Need(t)
	avxtest.Clear(t, "Guard", func() {
		_, _ = Guard("dirty", func() (int, error) { avxtest.Dirty(); return 0, nil })
	})
}

// Guard converts every panic to an error.
func TestGuard(t *testing.T) {
	defer spawntest.Heal()
	stderr := os.Stderr
	os.Stderr, _ = os.Open(os.DevNull)
	defer func() { os.Stderr = stderr }()
	if v, err := Guard("fine", func() (int, error) { return 3, nil }); v != 3 || err != nil {
		t.Fatal(v, err)
	}
	if v, err := Guard("bad", func() (int, error) { return 3, errs.ErrKey }); v != 0 || err == nil {
		t.Fatal(v, err)
	}
	for range 2 {
		v, err := Guard("broken", func() (int, error) { panic("ouch") })
		if v != 0 || err == nil || !strings.Contains(err.Error(), "EngineError") ||
			!strings.Contains(err.Error(), "ouch") {
			t.Fatal(v, err)
		}
	}
}

// A panic anywhere cancels all jobs. Jobs can still be waited for and freed, but no new job starts.
func TestPanicEndsJobs(t *testing.T) {
	defer spawntest.Heal()
	stderr := os.Stderr
	os.Stderr, _ = os.Open(os.DevNull)
	defer func() { os.Stderr = stderr }()
	stopping, stop := make(chan struct{}), make(chan struct{})
	writes := keep((&Verb{Name: "writes", usesMemory: true}).background(nil, func(ctx context.Context,
		_ *job.Job) (any, error) {
		<-ctx.Done()
		close(stopping)
		<-stop
		return none{}, context.Cause(ctx)
	}))
	_, _ = Guard("broken", func() (int, error) { panic("ouch") })
	<-stopping
	engine := func(err error) bool { return errors.Is(err, errs.ErrEngine) && strings.Contains(err.Error(), "ouch") }
	if done, err := Wait(writes, 0); done || err != nil {
		t.Error("Wait before the job has ended:", done, err)
	}
	if r, err := Take(writes, 0, TakeNext); r != nil || err != nil {
		t.Error("Take before the job has ended:", r, err)
	}
	for _, verb := range []string{"cancel", "progress", "report"} {
		if _, err := Call(verb, "", []int64{int64(writes)}); err != nil {
			t.Error(verb, err)
		}
	}
	if _, err := Call("cache_counts", "", nil); err != nil { // overwire.metrics must not raise
		t.Error(err)
	}
	close(stop)
	if done, err := Wait(writes, -1); done || !engine(err) {
		t.Error(done, err)
	}
	if r, err := Take(writes, -1, TakeAll); r != nil || !engine(err) {
		t.Error(r, err)
	}
	Free(writes, FreeEnded)
	if _, err := get[*entry](writes); err == nil {
		t.Error("the job's handle still exists")
	}
	if _, err := Wait(writes, 0); !engine(err) {
		t.Error(err)
	}
	if _, err := Call("knobs", "", nil); !engine(err) {
		t.Error(err)
	}
	if _, err := Start("open", `{"uris":["x"]}`, nil); !engine(err) {
		t.Error(err)
	}
}

func TestHandlesAreNeverUsedTwice(t *testing.T) {
	var wg sync.WaitGroup
	var seen sync.Map
	for range 8 {
		wg.Add(1)
		spawn.Go("test", func() {
			defer wg.Done()
			for i := range 1000 {
				h := keep(i)
				if _, twice := seen.LoadOrStore(h, true); twice || h == 0 {
					t.Errorf("handle %d was used twice", h)
				}
				if v, err := get[int](h); v != i || err != nil {
					t.Error(v, err)
				}
				if _, err := get[*entry](h); !errors.Is(err, errs.ErrArgument) {
					t.Error("an int was accepted as a job:", err)
				}
				if v := drop(h); v != i {
					t.Error(v)
				}
				if _, err := get[int](h); !errors.Is(err, errs.ErrArgument) {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// PackTable writes the layout that table.c reads.
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
		if w := fmt.Sprint(want.Name, int64(want.DType), want.Shape, want.Bytes, want.Stored, want.Source,
			want.Alias); got != w {
			t.Errorf("got %s, want %s", got, w)
		}
	}
	if len(b) != 0 {
		t.Error("bytes left:", len(b))
	}
}

func TestRequests(t *testing.T) {
	if _, err := requests(make([]int64, 5)); !errors.Is(err, errs.ErrArgument) {
		t.Error(err)
	}
	if r, err := requests(nil); len(r) != 0 || r == nil || err != nil {
		t.Error("an empty list of requests became all tensors:", r, err)
	}
	r, err := requests([]int64{7, 4096, 1, 2, 3, -1})
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

// idle fails the test if a goroutine of the engine does not end.
func idle(t *testing.T) {
	t.Helper()
	if n := spawntest.Left(); len(n) != 0 {
		t.Fatal("still running:", n)
	}
}

// all starts to load every tensor of a model.
func all(t *testing.T, m uint64) uint64 {
	t.Helper()
	h, err := Start("load", "{}", []int64{int64(m), 1})
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// Wait with a timeout of zero reports a job that has ended.
func TestWaitWithoutATimeout(t *testing.T) {
	m, err := openedModel(spec(t, plain(t, 1000)))
	if err != nil {
		t.Fatal(err)
	}
	defer Free(m, FreeNow)
	for range 100 {
		h := all(t, m)
		if done, err := Wait(h, time.Minute); !done || err != nil {
			t.Fatal(done, err)
		}
		if done, err := Wait(h, 0); !done || err != nil {
			t.Fatal("Wait(0) does not report the end:", err)
		}
		r, err := Take(h, 0, TakeAll)
		if err != nil || len(r.Tensors) != 1 || !r.Tensors[0].OK || len(r.Numbers) != 2 || r.Numbers[0] != 0 ||
			r.Numbers[1] == 0 || r.Text != "" {
			t.Fatal(r, err)
		}
		r.Drop()
		Free(h, FreeNow)
	}
	idle(t)
}

// TakeLast returns the results and the report, and frees the job.
func TestTakeLast(t *testing.T) {
	m, err := openedModel(spec(t, plain(t, 1000)))
	if err != nil {
		t.Fatal(err)
	}
	defer Free(m, FreeNow)
	h := all(t, m)
	r, err := Take(h, time.Minute, TakeLast)
	if err != nil || len(r.Tensors) != 1 || !strings.Contains(r.Text, `"bytes":1000`) {
		t.Fatal(r, err)
	}
	r.Drop()
	if _, err := Take(h, 0, TakeAll); !errors.Is(err, errs.ErrArgument) {
		t.Error("the job still exists:", err)
	}
	idle(t)
}

// Every verb refuses a wrong count of numbers with an error that says so.
func TestTable(t *testing.T) {
	for _, v := range Table() {
		if v.Doc == "" || !strings.HasSuffix(v.Doc, ".") {
			t.Errorf("%s: %q", v.Name, v.Doc)
		}
		if v.Kind == Answered != (v.call != nil) || v.Kind == Answered == (v.start != nil) {
			t.Errorf("%s: of kind %d", v.Name, v.Kind)
		}
		if v.Tail != "" {
			continue
		}
		numbers := make([]int64, len(v.Ints)+1)
		_, err := Call(v.Name, "{}", numbers)
		if v.Kind != Answered {
			_, err = Start(v.Name, "{}", numbers)
		}
		if !errors.Is(err, errs.ErrArgument) || !strings.Contains(err.Error(), "numbers") {
			t.Errorf("%s: %v", v.Name, err)
		}
	}
}

// Only one load attaches to a preload, even while the preload opens its files. If either is freed at any time, nothing
// leaks.
func TestPreloadHandOver(t *testing.T) {
	path := plain(t, 1<<20)
	missing := path + ".missing"
	for round := range 50 {
		h, err := Start("preload", spec(t, path), nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Take(h, 0, TakeAll); !errors.Is(err, errs.ErrArgument) {
			t.Fatal("Take of a preload:", err)
		}
		m, err := openedModel(spec(t, path))
		if err != nil || m == 0 {
			t.Fatal(m, err)
		}
		answer, err := called("join", "{}", int64(m))
		if err != nil || answer != `{"device":"","notes":null}` {
			t.Fatal(answer, err)
		}
		load := all(t, m)
		if round%2 == 1 { // the caller gives up at some point
			Free(load, FreeNow)
			Free(m, FreeNow)
			Free(h, FreeNow)
			continue
		}
		for over := false; !over; {
			r, err := Take(load, time.Second, TakeNext)
			if err != nil {
				t.Fatal(err)
			}
			if r == nil {
				continue
			}
			over = len(r.Tensors) == 0
			if len(r.Numbers) != 1+2*len(r.Tensors) {
				t.Fatal(r.Numbers)
			}
			r.Drop()
		}
		Free(m, FreeNow)
		Free(load, FreeNow)
		Free(h, FreeNow)
	}
	h, err := Start("preload", spec(t, missing), nil)
	if err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); ; {
		if _, err := Wait(h, time.Second); errors.Is(err, errs.ErrNotFound) {
			break
		}
		if time.Now().After(end) {
			t.Fatal("a preload of a missing file does not end")
		}
	}
	idle(t)
}

// If a verb has a path to write in its request, it must be a replacer. Its Python function then waits for background
// saves, and preloads of the replaced file are dropped.
func TestRequestsWithAPathReplaceIt(t *testing.T) {
	others := map[string]string{
		"write": "the path is only for errors: the file is already open, and the verb rename replaces the path",
	}
	var hasPath func(of reflect.Type) bool
	hasPath = func(of reflect.Type) bool {
		if of.Kind() != reflect.Struct {
			return false
		}
		for i := range of.NumField() {
			f := of.Field(i)
			key, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if key == "path" || f.Anonymous && hasPath(f.Type) {
				return true
			}
		}
		return false
	}
	writes := 0
	for _, v := range Table() {
		if v.Request == nil {
			continue
		}
		switch _, isOther := others[v.Name]; {
		case hasPath(v.Request) && !isOther && !v.WritesPath():
			t.Errorf("%s: its request has a path but no replacedPath", v.Name)
		case isOther && v.WritesPath():
			t.Errorf("%s: its request must not be a replacer", v.Name)
		case v.WritesPath():
			writes++
		}
	}
	if writes < 8 {
		t.Errorf("%d verbs replace a path, want at least 8", writes)
	}
}
