package binding

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/delta"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/tensor"
)

// result runs a verb and returns its result.
func result(name, text string, numbers ...int64) (*Result, error) {
	h, err := Start(name, text, numbers)
	if err != nil {
		return nil, err
	}
	r, err := Take(h, time.Minute, TakeLast)
	if err != nil {
		Free(h, FreeCalled)
	}
	return r, err
}

func called(name, text string, numbers ...int64) (string, error) {
	r, err := result(name, text, numbers...)
	if err != nil {
		return "", err
	}
	return r.Text, nil
}

func openedModel(spec string) (uint64, error) {
	r, err := result("open", spec)
	if err != nil {
		return 0, err
	}
	return r.Model, nil
}

func openModels() (n int) {
	for _, v := range handles.Range {
		if _, ok := v.(*load.Model); ok {
			n++
		}
	}
	return n
}

// A result has one receiver. A result without a receiver is freed.
func TestResultIsTakenOnce(t *testing.T) {
	before := openModels()
	open := spec(t, plain(t, 1000))
	for round := range 50 {
		h, err := Start("open", open, nil)
		if err != nil {
			t.Fatal(err)
		}
		if round%2 == 0 { // otherwise the call is abandoned at some point
			if done, err := Wait(h, time.Minute); !done || err != nil {
				t.Fatal(done, err)
			}
		}
		if round%3 == 0 {
			Free(h, FreeNow)
		} else {
			Free(h, FreeCalled)
		}
		if _, err := Take(h, 0, TakeAll); !errors.Is(err, errs.ErrArgument) {
			t.Fatal("Take of a call that was given up:", err)
		}
	}
	idle(t)
	if n := openModels(); n != before {
		t.Errorf("%d models are open, want %d", n, before)
	}
}

// A delta that is not taken is freed with its job. A delta that was taken remains until its owner frees it.
func TestDeltasHaveOneReceiver(t *testing.T) {
	deltas := func() (n int) {
		for _, v := range handles.Range {
			if _, ok := v.(*delta.File); ok {
				n++
			}
		}
		return n
	}
	before := deltas()
	now, base := make([]byte, 64), make([]byte, 64)
	now[5] = 1
	at := func(b []byte) int64 { return int64(uintptr(unsafe.Pointer(&b[0]))) }
	encode := func() uint64 {
		h, err := Start("delta_encode", `{"names":["x"],"dtypes":["U8"],"shapes":[[64]]}`,
			[]int64{at(now), at(base), 0, 0})
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	for _, how := range []int{FreeNow, FreeEnded} {
		h := encode()
		if done, err := Wait(h, time.Minute); !done || err != nil {
			t.Fatal(done, err)
		}
		Free(h, how)
		if n := deltas(); n != before {
			t.Errorf("%d deltas leaked", n-before)
		}
	}
	r, err := Take(encode(), time.Minute, TakeLast)
	if err != nil {
		t.Fatal(err)
	}
	var part deltaPart
	if err := json.Unmarshal([]byte(r.Text), &part); err != nil || part.Handle == 0 {
		t.Fatal(r.Text, err)
	}
	if _, err := get[*delta.File](part.Handle); err != nil {
		t.Error(err)
	}
	Free(part.Handle, FreeNow)
	if n := deltas(); n != before {
		t.Errorf("%d deltas leaked", n-before)
	}
	runtime.KeepAlive(now)
	runtime.KeepAlive(base)
}

// If a call that waits for a silent server is abandoned, it ends and leaves no connection and no goroutine.
func TestAbandonedCallsEnd(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	accepted := make(chan net.Conn)
	spawn.Go("silent server", func() {
		for {
			c, err := l.Accept()
			if err != nil {
				close(accepted)
				return
			}
			accepted <- c
		}
	})
	host := "http://" + l.Addr().String()
	for _, c := range []struct{ verb, uri string }{
		{"open", host + "/m.safetensors"}, {"open", host + "/m.safetensors.index.json"}, {"open", host + "/folder/"},
		{"names", host + "/folder/"}, {"inspect", host + "/m.safetensors"}, {"records", host + "/m.tensors"},
	} {
		text, _ := json.Marshal(map[string]any{"uris": []string{c.uri}})
		if c.verb == "records" {
			text, _ = json.Marshal(map[string]any{"uri": c.uri})
		}
		h, err := Start(c.verb, string(text), nil)
		if err != nil {
			t.Fatal(err)
		}
		server := <-accepted
		Free(h, FreeCalled)
		// The server detects that its connection is closed after the request.
		_ = server.SetReadDeadline(time.Now().Add(20 * time.Second))
		for b := make([]byte, 4096); ; {
			if _, err := server.Read(b); err != nil {
				if e, ok := err.(net.Error); ok && e.Timeout() {
					t.Errorf("%s %s: the connection is still open", c.verb, c.uri)
				}
				break
			}
		}
		_ = server.Close()
		if _, err := Wait(h, 0); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%s: the job still exists: %v", c.verb, err)
		}
	}
	_ = l.Close()
	for range accepted {
	}
	idle(t)
}

func TestUnknownVerb(t *testing.T) {
	if _, err := Start("destroy", "{}", nil); !errors.Is(err, errs.ErrArgument) {
		t.Error(err)
	}
	if _, err := called("open", "["); !errors.Is(err, errs.ErrArgument) {
		t.Error(err)
	}
}

// Numbers that do not describe tensors are refused.
func TestInvalidTensorsAreRefused(t *testing.T) {
	for _, bad := range []struct {
		contiguous int64
		flat       []int64
	}{{-1, nil}, {1, []int64{5}}, {1 << 62, []int64{1, 2}}, {0, []int64{8, 1}}, {0, []int64{8, 1, 2, 3, 4}},
		{1, []int64{8, 16, 8, 1, -1}}} {
		if _, err := viewsOf(bad.contiguous, bad.flat); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%v: %v", bad, err)
		}
	}
	views, err := viewsOf(2, []int64{8, 8, 16, 16, 8, 2, 1, 8, 2, 8, 1, 1, 16, 1})
	if err != nil || len(views) != 4 {
		t.Fatal(views, err)
	}
	once, at := distinct(views)
	if len(once) != 2 || !slices.Equal(at, []int{0, 0, 1, 0}) {
		t.Errorf("%v, %v", once, at)
	}
	chain := []*delta.File{{Tensors: []delta.Tensor{{Name: "a"}}}}
	q := deltaApply{DTypes: []string{"U8"}, Shapes: [][]int64{{3}}, Streams: []int64{0}}
	for _, bad := range [][]int64{{1, 0, 0, 0, 64}, {0, 1, 0, 0, 64}, {0, 0, 1, 0, 64}, {0, 0, 0, 1, 64},
		{-1, 0, 0, 0, 64}, {0, 0, 0, 0}} {
		if _, err := q.targets(chain, bad); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%v: %v", bad, err)
		}
	}
	if got, err := q.targets(chain, []int64{0, 0, 0, 0, 64}); err != nil || len(got) != 1 || got[0].Name != "a" ||
		got[0].At != 64 {
		t.Error(got, err)
	}
}

// The handle that `records` returns for a .tensors file can be opened once. Freeing the last handle or model
// closes the file.
func TestRecordsStayOpen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.tensors")
	in := []save.Input{{Name: "a", DType: tensor.U8, Shape: []int64{3}, Data: []byte{1, 2, 3}}}
	if _, err := save.Write(t.Context(), nil, save.Spec{Path: path}, in); err != nil {
		t.Fatal(err)
	}
	descriptors := func() (n int) {
		links, _ := filepath.Glob("/proc/self/fd/*")
		for _, link := range links {
			if to, _ := os.Readlink(link); to == path {
				n++
			}
		}
		return n
	}
	for _, opens := range []bool{true, false} {
		text, err := called("records", fmt.Sprintf(`{"uri":%q}`, path))
		if err != nil {
			t.Fatal(err)
		}
		var file recordsAnswer
		if err := json.Unmarshal([]byte(text), &file); err != nil || len(file.Entries) != 1 || descriptors() != 1 {
			t.Fatalf("%v: %s, %d descriptors", err, text, descriptors())
		}
		if opens {
			open := fmt.Sprintf(`{"uris":[%q],"opened":%d}`, path, file.Handle)
			m, err := openedModel(open)
			if err != nil || descriptors() != 1 {
				t.Fatal(err, descriptors())
			}
			if _, err := openedModel(open); !errors.Is(err, errs.ErrArgument) {
				t.Errorf("opened the same handle twice: %v", err)
			}
			file.Handle = m
		}
		Free(file.Handle, FreeNow)
		if n := descriptors(); n != 0 {
			t.Errorf("opens %v: %d descriptors leaked", opens, n)
		}
	}
}
