package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/measure"
)

// A whole run at toy sizes gives every row a value or a reason, leaves no
// files behind, and writes text without panicking.
func TestRun(t *testing.T) {
	dir := t.TempDir()
	var text bytes.Buffer
	rep, err := Run(context.Background(), nil, Options{Options: measure.Options{Size: 4 << 20, Repeat: 1, Dir: dir,
		Row: func(r measure.Row) {
			writeRow(&text, r)
		}}})
	if err != nil {
		t.Fatal(err)
	}
	groups := map[string]int{}
	for _, r := range rep.Rows {
		groups[r.Group]++
		if (r.Value == 0) == (r.Missing == "") && r.Unit != "us" && r.Unit != "%" {
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
	writeHead(&text, &rep)
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
		{context.Background(), Options{What: "speed"}, errs.ErrArgument},
		{done, Options{Options: measure.Options{Size: 1 << 20, Dir: t.TempDir()}}, errs.ErrCancelled},
		{context.Background(), Options{Options: measure.Options{Dir: t.TempDir() + "/none"}}, errs.ErrIO},
	} {
		if _, err := Run(c.ctx, nil, c.opt); !errors.Is(err, c.want) {
			t.Errorf("%+v: %v, want %v", c.opt, err, c.want)
		}
	}
}
