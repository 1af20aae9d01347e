package avxtest

import (
	"testing"

	"github.com/overwire/overwire/gosrc/internal/avx"
)

// Dirty registers are detected, and Clear clears them.
func TestClear(t *testing.T) {
	Need(t)
	Clear(t, "avx.Clear", avx.Clear)
	if heard := (&listener{TB: t}); !heard.after(func() { Dirty() }) {
		t.Error("a dirty upper half was not detected")
	}
	Clear(t, "dirty registers and avx.Clear", func() { Dirty(); avx.Clear() })
}

// A listener records errors.
type listener struct {
	testing.TB
	failed bool
}

func (l *listener) Errorf(string, ...any) { l.failed = true }

func (l *listener) after(f func()) bool {
	Clear(l, "a function that dirties registers", f)
	return l.failed
}
