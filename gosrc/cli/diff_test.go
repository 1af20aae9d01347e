package cli

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
)

// inspect --top lists only the largest tensors, and --summary lists none.
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

// inspect --filter lists and counts only matching tensors, even with --digests. In a pattern, * matches any characters.
func TestInspectFilter(t *testing.T) {
	a := made(t, "llama-bf16")
	out := must(t, "inspect", a, "--filter", "*.mlp.*_proj.weight")
	rows := strings.Count(out, "  plain\n")
	if rows == 0 || rows != strings.Count(out, ".mlp.") || strings.Contains(out, "lm_head") ||
		!strings.Contains(out, fmt.Sprintf("all    %d", rows)) {
		t.Errorf("%d rows:\n%s", rows, out)
	}
	if out := must(t, "inspect", a, "--digests", "--filter", "lm_head*"); strings.Count(out, "\n") != 1 ||
		!strings.HasSuffix(out, "  lm_head.weight\n") {
		t.Error(out)
	}
	for name, want := range map[string]bool{"a/b.c": true, "ab": true, "a": false, "xab": false} {
		if globMatches("a*[bc]", name) != want {
			t.Errorf("%s: %t", name, !want)
		}
	}
}

// diff --limit lists the tensors that changed most and prints how many it omits. --json lists all.
func TestDiffLimit(t *testing.T) {
	a := made(t, "llama-bf16")
	b := filepath.Join(t.TempDir(), "b.safetensors")
	must(t, "bench", "gen", "llama-bf16", b, "--size", "2MB", "--seed", "8")
	all, few := must(t, "diff", a, b), must(t, "diff", a, b, "--limit", "2")
	if n := strings.Count(few, "BF16"); n != 2 ||
		!strings.Contains(few, fmt.Sprintf("and %d more", strings.Count(all, "BF16")-2)) {
		t.Errorf("%d rows:\n%s", n, few)
	}
	if x, y := must(t, "diff", a, b, "--json"), must(t, "diff", a, b, "--json", "--limit", "2"); x != y {
		t.Error("--limit changes the document")
	}
}

// With --exit-code, the status of diff says whether the models differ. diff still prints its result. --summary omits
// the tensors.
func TestDiffStatus(t *testing.T) {
	a := made(t, "llama-bf16")
	b := filepath.Join(t.TempDir(), "b.safetensors")
	must(t, "bench", "gen", "llama-bf16", b, "--size", "2MB", "--seed", "8")
	must(t, "diff", a, b)
	must(t, "diff", a, a, "--exit-code")
	status, out, stderr := overwire("diff", a, b, "--exit-code", "--summary")
	if status != ExitBad || stderr != "overwire: the models differ\n" || strings.Contains(out, "BF16") ||
		!strings.Contains(out, "elements changed") {
		t.Errorf("status %d\n%s%s", status, out, stderr)
	}
	if status, out, _ := overwire("diff", a, b, "--exit-code", "--json"); status != ExitBad ||
		strings.Count(out, "\n{") != 0 {
		t.Errorf("status %d\n%s", status, out)
	}
}
