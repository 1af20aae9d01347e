package cli

import (
	"path/filepath"
	"strings"
	"testing"
)

// inspect --top lists the largest tensors alone, and --summary an empty list.
func TestInspectTop(t *testing.T) {
	a := made(t, "llama-bf16")
	out := must(t, "inspect", a, "--top", "2")
	if n := strings.Count(out, "  plain\n"); n != 2 || !strings.Contains(out, "lm_head.weight") {
		t.Errorf("%d tensors:\n%s", n, out)
	}
	if out := must(t, "inspect", a, "-s", "--json"); !strings.Contains(out, `"tensors": []`) {
		t.Error(out)
	}
}

// diff --exit-code tells by its status whether models differ, and prints its result all the
// same; --summary leaves the tensors out.
func TestDiffStatus(t *testing.T) {
	a := made(t, "llama-bf16")
	b := filepath.Join(t.TempDir(), "b.safetensors")
	must(t, "bench", "gen", "llama-bf16", b, "--size", "2MB", "--seed", "8")
	must(t, "diff", a, b)
	must(t, "diff", a, a, "--exit-code")
	status, out, stderr := overwire("diff", a, b, "--exit-code", "--summary")
	if status != ExitBad || stderr != "overwire: the models differ\n" || strings.Contains(out, "BF16") || !strings.Contains(out, "elements changed") {
		t.Errorf("status %d\n%s%s", status, out, stderr)
	}
	if status, out, _ := overwire("diff", a, b, "--exit-code", "--json"); status != ExitBad || strings.Count(out, "\n{") != 0 {
		t.Errorf("status %d\n%s", status, out)
	}
}
