package cli

// This file tests load --plan and doctor's report on a model.

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// layered writes a model with 16 layers of 1 MB and another 500 KB outside them, and returns its path.
func layered(t *testing.T) string {
	t.Helper()
	header, end := `{"embed.weight":{"dtype":"U8","shape":[500000],"data_offsets":[0,500000]}`, 500_000
	for i := range 16 {
		header += fmt.Sprintf(`,"layers.%d.up.weight":{"dtype":"U8","shape":[1000000],"data_offsets":[%d,%d]}`, i, end,
			end+1_000_000)
		end += 1_000_000
	}
	path := filepath.Join(t.TempDir(), "layered.safetensors")
	file := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header)+1)), header+"}"...)
	if err := os.WriteFile(path, append(file, make([]byte, end)...), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// load --plan prints how much memory a load needs and, with --keep, how much an offload would stream. doctor accepts a
// model as an argument. Neither needs a GPU, and both refuse wrong input.
func TestPlan(t *testing.T) {
	path := layered(t)
	for keep, want := range map[string]int{"0": 0, "2MB": 2, "3500KB": 3, "1TB": 16} {
		var r planReport
		if err := json.Unmarshal([]byte(must(t, "load", "--plan", path, "--json", "--keep", keep)), &r); err != nil {
			t.Fatal(err)
		}
		o, streamed := r.Offload, int64(16-want)*1_000_000
		if want == 16 {
			if len(r.Tiers) != 1 || r.Tiers[0].Where != "resident" || r.Tiers[0].Device != r.Bytes {
				t.Errorf("keep %s: %+v", keep, r.Tiers)
			}
		} else if len(r.Tiers) != 3 || r.Tiers[1].Device != o.Rest+o.Kept+streamed+2_000_000 || r.Tiers[1].Host != 0 ||
			r.Tiers[2].Device != o.DeviceBytes() || r.Tiers[2].Host != streamed {
			t.Errorf("keep %s: %+v", keep, r.Tiers)
		}
		if o.Kept != int64(want)*1_000_000 || o.Rest != 500_000 || o.Rest+o.Kept+o.Streamed != r.Bytes ||
			len(o.Blocks) != 16-want {
			t.Errorf("keep %s: %+v of %d bytes", keep, o, r.Bytes)
		}
	}
	for _, c := range []struct{ argv, want string }{
		{"load --plan " + path, "at peak"},
		{"load --plan " + path, "weights compressed on the device: 19 MB on the device; each pass decodes all weights"},
		{"load --plan " + path, "weights compressed on the host: 4.5 MB on the device, 16 MB on the host; each pass also"},
		{"load --plan " + path, "with group=, each of N GPUs of a host keeps and copies 1/N"},
		{"load --plan --keep 0 " + path,
			"streamed: 16 blocks (16 MB), from layers.0 to layers.15, with at most 16 MB of host memory"},
		{"load --plan --keep 1TB " + path, "nothing is streamed"}, {"doctor " + path, path},
	} {
		if out := must(t, strings.Fields(c.argv)...); !strings.Contains(out, c.want) {
			t.Errorf("%s lacks %q:\n%s", c.argv, c.want, out)
		}
	}
	for argv, want := range map[string]int{
		"load --plan": ExitUsage, "load --keep 1MB " + path: ExitUsage, "load --plan --keep many " + path: ExitUsage,
		"load --plan --device tpu " + path: ExitNotSupported,
		"load --plan nowhere":              ExitNotFound, "doctor nowhere": ExitNotFound,
	} {
		if status, _, stderr := overwire(strings.Fields(argv)...); status != want {
			t.Errorf("%s: status %d, %s", argv, status, stderr)
		}
	}
}
