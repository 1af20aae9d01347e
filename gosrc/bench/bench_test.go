package bench

import (
	"bytes"
	"context"
	"errors"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/weights"
)

// The bound of data whose entropy is known by construction.
func TestBound(t *testing.T) {
	all := func(n int, f func(i int) byte) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = f(i)
		}
		return b
	}
	const n = 1 << 16
	for _, c := range []struct {
		name string
		d    tensor.DType
		data []byte
		want float64 // share of the bytes
	}{
		{"one exponent, every mantissa and sign", tensor.BF16, all(n, func(i int) byte {
			if i%2 == 0 {
				return byte(i/2)&0x7f | 0x80 // low bit of the exponent
			}
			return byte(i/2)&0x80 | 0x3f
		}), 0.5},
		{"constant", tensor.BF16, all(n, func(int) byte { return 0x3f }), 0},
		{"nothing to gain", tensor.I64, all(n, func(i int) byte { return byte(i) }), 1},
		{"four equal high nibbles, every low one", tensor.I8, all(n, func(i int) byte { return byte(i&15 | i>>4&3<<4) }), 0.75},
		{"two equal nibbles", tensor.F4, all(n, func(i int) byte { return byte(i&1 | i>>1&1<<4) }), 0.25},
		{"fp32 that holds one byte", tensor.F32, all(n, func(i int) byte {
			if i%4 == 2 { // seven bits of mantissa
				return byte(i/4) & 0x7f
			}
			return 0
		}), 7. / 32},
	} {
		if got := Bound(c.d, c.data) / float64(len(c.data)); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("%s: %.6f of the bytes, want %.6f", c.name, got, c.want)
		}
	}
	for _, d := range []tensor.DType{tensor.BF16, tensor.F32, tensor.U8} {
		if got := Bound(d, nil); got != 0 {
			t.Errorf("%v without bytes: %v", d, got)
		}
	}
	// Generated bf16: (8 + H) / 16 with H from 2.55 to 2.65.
	w, err := weights.Make(weights.Options{Size: 8 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if got := Bound(tensor.BF16, w[0].Data) / float64(len(w[0].Data)); got < 10.55/16 || got > 10.65/16 {
		t.Errorf("generated bf16: %.4f", got)
	}
}

// A whole run at toy sizes gives every row a value or a reason, leaves no
// files behind, and writes text without panicking.
func TestRun(t *testing.T) {
	dir := t.TempDir()
	var text bytes.Buffer
	rep, err := Run(context.Background(), nil, Options{Size: 4 << 20, Repeat: 1, Dir: dir, Row: func(r Row) { r.Text(&text) }})
	if err != nil {
		t.Fatal(err)
	}
	groups := map[string]int{}
	for _, r := range rep.Rows {
		groups[r.Group]++
		if (r.Value == 0) == (r.Missing == "") && r.Unit != "us" && r.Unit != "%" && !strings.Contains(r.Name, "stored") {
			t.Errorf("%+v has neither value nor reason", r)
		}
		if !strings.Contains(text.String(), r.Name) {
			t.Errorf("%q was not shown", r.Name)
		}
	}
	for _, g := range Whats[1:] {
		if groups[g] == 0 {
			t.Errorf("no row of %s", g)
		}
	}
	rep.Floors.Text(&text, rep.Machine)
	if rep.Floors.CopyOne <= 0 || rep.Floors.RawCopy <= 0 || rep.Machine.Cores < 1 {
		t.Errorf("floors %+v on %+v", rep.Floors, rep.Machine)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

// Wrong requests, a cancelled context and a folder that is not there are
// errors by class.
func TestRunRefuses(t *testing.T) {
	done, cancel := context.WithCancel(context.Background())
	cancel()
	for _, c := range []struct {
		ctx  context.Context
		opt  Options
		want error
	}{
		{context.Background(), Options{What: "speed"}, fault.ErrArgument},
		{done, Options{Size: 1 << 20, Dir: t.TempDir()}, fault.ErrCancelled},
		{context.Background(), Options{Dir: t.TempDir() + "/none"}, fault.ErrIO},
	} {
		if _, err := Run(c.ctx, nil, c.opt); !errors.Is(err, c.want) {
			t.Errorf("%+v: %v, want %v", c.opt, err, c.want)
		}
	}
}

// The first error of parallel work wins, every part is done once otherwise.
func TestParallel(t *testing.T) {
	done := make([]int, 1000)
	if err := parallel(4, 1000, 7, func(_ int, lo, hi int64) error {
		for i := lo; i < hi; i++ {
			done[i]++
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for i, n := range done {
		if n != 1 {
			t.Fatalf("part %d done %d times", i, n)
		}
	}
	boom := errors.New("boom")
	if err := parallel(4, 1000, 7, func(int, int64, int64) error { return boom }); err != boom {
		t.Errorf("got %v", err)
	}
}
