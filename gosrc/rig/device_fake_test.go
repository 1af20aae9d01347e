//go:build owfake

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/measure"
)

// On the fake driver everything is measured, after its bytes were compared, and nothing is left on the device.
func TestDeviceFake(t *testing.T) {
	end := cuda.Fake(2 << 30)
	dir, trace := t.TempDir(), filepath.Join(t.TempDir(), "trace.json")
	rep, err := Run(t.Context(), nil, Options{Device: "cuda", Trace: trace,
		Options: measure.Options{Size: 8 << 20, Repeat: 1, Dir: dir}})
	if err != nil {
		t.Fatal(err)
	}
	if left := end(); left != "" {
		t.Errorf("left behind: %s", left)
	}
	want := map[string]bool{fmt.Sprintf("pinned copy to the device, %d KiB", cuda.DefaultSlotBytes>>10): false,
		"page cache into pinned memory": false, "decode llama-bf16, 1 MiB in one": false,
		"decode fp8-e4m3": false, "llama-bf16, plain": false, "raw TCP into the pinned slots": false,
		"llama-bf16, compressed over HTTP": false, "moe-bf16, compressed": false, "fp16, compressed": false,
		"a tensor beside its bytes": false, "cost of the checksums": false, "the copy stream is busy": false}
	for _, r := range rep.Rows {
		for name := range want {
			if strings.Contains(r.Name, name) && r.Missing == "" && (r.Value > 0 || r.Unit == "%" || r.Unit == "us") {
				want[name] = true
			}
		}
	}
	for name, seen := range want {
		if !seen {
			t.Errorf("no row of %q", name)
		}
	}
	if d := rep.Device; d == nil || d.Name != "cuda:0" || d.Wire <= 0 || d.Across <= 0 || len(d.Info) != 2 {
		t.Errorf("%+v", rep.Device)
	}
	if b, err := os.ReadFile(trace); err != nil || !json.Valid(b) || !strings.Contains(string(b), `"copies"`) {
		t.Errorf("the trace: %v", err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

// A driver that fails in the middle costs the rows that need it; the others are
// there, and the failure is the run's error.
func TestDeviceFakeFails(t *testing.T) {
	end := cuda.Fake(2 << 30)
	defer end()
	if _, err := cuda.Open(0); err != nil {
		t.Fatal(err)
	}
	cudatest.Fail(40, 999, true)
	rep, err := Run(t.Context(), nil, Options{Device: "cuda", Only: []string{"kernel", "bf16"},
		Options: measure.Options{Size: 1 << 20, Repeat: 1, Dir: t.TempDir()}})
	if err == nil || len(rep.Failures) == 0 || !strings.Contains(err.Error(), rep.Failures[0]) {
		t.Fatalf("%v, %q", err, rep.Failures)
	}
	var failed, good int
	for _, r := range rep.Rows {
		switch {
		case strings.HasPrefix(r.Missing, "FAILED: "):
			failed++
		case r.Missing == "":
			good++
		}
	}
	if failed != len(rep.Failures) || good == 0 {
		t.Errorf("%d failed, %d good: %+v", failed, good, rep.Rows)
	}
}
