package bench

import (
	"bytes"
	"errors"
	"math"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/weights"
)

// fieldEntropy is correct for data with known entropy.
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
		{"no coded field", tensor.I64, all(n, func(i int) byte { return byte(i) }), 1},
		{"four equal high nibbles, every low one", tensor.I8, all(n, func(i int) byte {
			return byte(i&15 | i>>4&3<<4)
		}), 0.75},
		{"two equal nibbles", tensor.F4, all(n, func(i int) byte { return byte(i&1 | i>>1&1<<4) }), 0.25},
		{"fp32 with one varying byte", tensor.F32, all(n, func(i int) byte {
			if i%4 == 2 { // seven bits of the mantissa
				return byte(i/4) & 0x7f
			}
			return 0
		}), 7. / 32},
	} {
		if got := fieldEntropy(c.d, c.data) / float64(len(c.data)); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("%s: %.6f of the bytes, want %.6f", c.name, got, c.want)
		}
	}
	for _, d := range []tensor.DType{tensor.BF16, tensor.F32, tensor.U8} {
		if got := fieldEntropy(d, nil); got != 0 {
			t.Errorf("%v without data: %v", d, got)
		}
	}
	// Generated bf16: (8 + H) / 16 with H from 2.55 to 2.65.
	w, err := weights.Make(weights.Options{Size: 8 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if got := fieldEntropy(tensor.BF16, w[0].Data) / float64(len(w[0].Data)); got < 10.55/16 || got > 10.65/16 {
		t.Errorf("generated bf16: %.4f", got)
	}
}

// runParallel returns the first error. Without an error, each part is done once.
func TestParallel(t *testing.T) {
	done := make([]int, 1000)
	if err := runParallel(4, 1000, 7, func(_ int, lo, hi int64) error {
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
	if err := runParallel(4, 1000, 7, func(int, int64, int64) error { return boom }); err != boom {
		t.Errorf("got %v", err)
	}
}

// A Reading reads exactly its range, and rejects invalid fields.
func TestReading(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	want := make([]byte, 5<<20+13)
	for i := range want {
		want[i] = byte(i*7 + i>>9)
	}
	if err := os.WriteFile(path, want, 0o600); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(want))
	r := Reading{Path: path, Lo: 77, Hi: int64(len(want)) - 5, GPU: -1, To: uint64(uintptr(unsafe.Pointer(&got[0]))),
		Threads: 3}
	if err := r.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := len(want) - 82; !bytes.Equal(got[:n], want[77:77+n]) || !bytes.Equal(got[n:], make([]byte, 82)) {
		t.Error("wrong bytes")
	}
	for _, wrong := range []func(*Reading){
		func(r *Reading) { r.Hi = 3 }, func(r *Reading) { r.Lo = -1 }, func(r *Reading) { r.Threads = 0 },
		func(r *Reading) { r.To = 0 },
		func(r *Reading) { r.GPU = 0 },
	} {
		bad := r
		wrong(&bad)
		if err := bad.Run(t.Context()); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	r.Path += "s"
	if err := r.Run(t.Context()); !errors.Is(err, errs.ErrNotFound) {
		t.Error(err)
	}
	r.Path, r.Hi = path, int64(len(want))+100
	if err := r.Run(t.Context()); !errors.Is(err, errs.ErrIO) {
		t.Error(err)
	}
}
