//go:build cgo && owfake

package bench

import (
	"bytes"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/measure"
)

// Loads to a GPU stand beside the wire of the same run, and nothing is left on
// the device.
func TestRunFake(t *testing.T) {
	end := cuda.Fake(2 << 30)
	var text bytes.Buffer
	opt := Options{Device: "cuda", Options: measure.Options{Size: 8 << 20, Repeat: 1, Dir: t.TempDir()}}
	opt.Begin = func(rep *measure.Report) { WriteHead(&text, rep) }
	opt.Row = func(row measure.Row) { WriteRow(&text, row) }
	rep, err := Run(t.Context(), nil, opt)
	if err != nil {
		t.Fatal(err)
	}
	if left := end(); left != "" {
		t.Errorf("left behind: %s", left)
	}
	if d := rep.Device; d == nil || d.Name != "cuda:0" || d.Wire <= 0 || len(d.Info) != 2 {
		t.Errorf("%+v", rep.Device)
	}
	for _, want := range []string{"copy pinned memory to cuda:0: ", "of what the wire allows", "cuda:0 is Fake GPU 0"} {
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
		t.Errorf("%d rows of loads", loads)
	}
}
