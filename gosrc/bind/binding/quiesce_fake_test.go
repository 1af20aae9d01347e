//go:build owfake

package binding

import (
	"fmt"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
)

// Quiescing leaves no GPU memory and no registered host memory. Its error names the objects that callers hold. The next
// load works.
func TestQuiesceFake(t *testing.T) {
	end := cuda.Fake(64 << 20)
	path := plain(t, 300_000)
	load := func() {
		m, err := openedModel(spec(t, path))
		if err != nil {
			t.Fatal(err)
		}
		defer Free(m, FreeNow)
		r, err := result("load", `{"device":"cuda:0"}`, int64(m), 1)
		if err != nil {
			t.Fatal(err)
		}
		r.Drop()
	}
	for range 2 {
		load()
		held, err := openedModel(spec(t, path))
		if err != nil {
			t.Fatal(err)
		}
		if s := cudatest.ReadState(); s.Blocks == 0 || s.Pins == 0 {
			t.Errorf("nothing is cached: %+v", s)
		}
		text := quiesceNow(t)
		if want := fmt.Sprintf(`{"running":null,"held":["an open model: %s"]}`, path); text != want {
			t.Errorf("got %s, expected %s", text, want)
		}
		Free(held, FreeNow)
		if text := quiesceNow(t); strings.Contains(text, "[") {
			t.Error(text)
		}
		if s := cudatest.ReadState(); s.Blocks+s.Bytes+s.Pins+s.Attached+s.Pending != 0 {
			t.Errorf("left: %+v", s)
		}
	}
	if left := end(); left != "" {
		t.Error(left)
	}
}

func quiesceNow(t *testing.T) string {
	t.Helper()
	r, err := Call("quiesce", "", []int64{10_000})
	if err != nil {
		t.Fatal(err)
	}
	return r.Text
}
