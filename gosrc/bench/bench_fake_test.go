//go:build owfake

package bench

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device/cuda"
)

// Loads to a GPU are compared with the rate of the PCIe link, and with plain reading and copying in the same run.
// Nothing leaks on the device.
func TestRunFake(t *testing.T) {
	end := cuda.Fake(2 << 30)
	var text bytes.Buffer
	opt := Options{Device: "cuda", Size: 8 << 20, Repeat: 1, Dir: t.TempDir()}
	opt.Begin = func(rep *Report) { WriteHead(&text, rep) }
	opt.Row = func(row Row) { WriteRow(&text, row) }
	rep, err := Run(t.Context(), nil, opt)
	if err != nil {
		t.Fatal(err)
	}
	if left := end(); left != "" {
		t.Errorf("leaked: %s", left)
	}
	if d := rep.Device; d == nil || d.Name != "cuda:0" || d.Wire <= 0 || len(d.Info) != 2 {
		t.Errorf("%+v", rep.Device)
	}
	for _, want := range []string{"copy pinned memory to cuda:0: ", "read the page cache and copy it to cuda:0: ", "of reading and copying as many bytes", "cuda:0 is Fake GPU 0"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, text.String())
		}
	}
	loads := 0
	for _, r := range rep.Rows {
		if r.Group == "load" && r.Value > 0 && r.Floor > 0 {
			loads++
		}
	}
	if loads != 2 {
		t.Errorf("%d rows for loads, want 2", loads)
	}
}

// A Reading copies a file's bytes to a GPU and leaks nothing there.
func TestReadingFake(t *testing.T) {
	end := cuda.Fake(64 << 20)
	want := bytes.Repeat([]byte("0123456789abcdef~"), 200_000)
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, want, 0o600); err != nil {
		t.Fatal(err)
	}
	gpu, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	const lo = 1000
	m, err := gpu.Alloc([]int64{int64(len(want)) - lo})
	if err != nil {
		t.Fatal(err)
	}
	slots := make([]byte, 2*SlotsEach*ReadStep)
	if err := gpu.Register(slots); err != nil {
		t.Fatal(err)
	}
	r := Reading{Path: path, Lo: lo, Hi: int64(len(want)), To: uint64(uintptr(m[0].Ptr)),
		Slots: uint64(uintptr(unsafe.Pointer(&slots[0]))), Threads: 2}
	if err := r.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(want)-lo)
	if err := gpu.Read(got, m[0]); err != nil || !bytes.Equal(got, want[lo:]) {
		t.Errorf("wrong bytes: %v", err)
	}
	gpu.Unregister(slots, func() {})
	m[0].Release()
	if left := end(); left != "" {
		t.Errorf("leaked: %s", left)
	}
}
