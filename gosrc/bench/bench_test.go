package bench

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

// A whole run at a small size estimates its duration, has a value in every row, and leaves no files.
func TestRun(t *testing.T) {
	dir := t.TempDir()
	var text bytes.Buffer
	opt := Options{Size: 4 << 20, Repeat: 1, Dir: dir}
	opt.Begin = func(rep *Report) { WriteHead(&text, rep) }
	opt.Row = func(row Row) { WriteRow(&text, row) }
	rep, err := Run(t.Context(), nil, opt)
	if err != nil {
		t.Fatal(err)
	}
	groups := map[string]int{}
	for _, r := range rep.Rows {
		groups[r.Group]++
		if r.Value <= 0 {
			t.Errorf("%+v", r)
		}
		if !strings.Contains(text.String(), "  "+r.Name+": ") {
			t.Errorf("%q was not shown", r.Name)
		}
	}
	for group, n := range map[string]int{"this machine": 2, "size": len(kinds), "save": 2, "load": 2} {
		if groups[group] != n {
			t.Errorf("%d rows of %s, want %d", groups[group], group, n)
		}
	}
	if rep.Estimate <= 0 || rep.Seconds <= 0 || rep.Device != nil {
		t.Errorf("%+v", rep)
	}
	for _, want := range []string{"this takes about ", "of reading as many bytes from the page cache", "of their size; the entropy of the coded field: "} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, text.String())
		}
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

// Invalid options, a cancelled context, a missing or too small folder, and a file that does not exist cause typed
// errors. No files are left.
func TestRunRefuses(t *testing.T) {
	done, cancel := context.WithCancel(context.Background())
	cancel()
	dir := t.TempDir()
	for _, c := range []struct {
		ctx  context.Context
		opt  Options
		want error
	}{
		{t.Context(), Options{Size: 1 << 20, Repeat: 1, Dir: dir, Device: "tpu"}, errs.ErrArgument},
		{t.Context(), Options{Size: 1 << 20, Repeat: 1, Dir: dir, Device: "cuda:x"}, errs.ErrArgument},
		{done, Options{Size: 1 << 20, Repeat: 1, Dir: dir}, errs.ErrCancelled},
		{t.Context(), Options{Size: 1 << 20, Repeat: 1, Dir: dir + "/none"}, errs.ErrIO},
		{t.Context(), Options{Size: 1 << 58, Repeat: 1, Dir: dir}, errs.ErrIO},
		{t.Context(), Options{Size: 1 << 20, Repeat: 1, Dir: dir, File: dir + "/none"}, errs.ErrNotFound},
	} {
		if _, err := Run(c.ctx, nil, c.opt); !errors.Is(err, c.want) {
			t.Errorf("%+v: %v, want %v", c.opt, err, c.want)
		}
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}
