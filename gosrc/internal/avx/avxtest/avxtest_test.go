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
		t.Error("an upper half in use was not seen")
	}
	Clear(t, "dirt and avx.Clear", func() { Dirty(); avx.Clear() })
}

// A listener notes errors.
type listener struct {
	testing.TB
	failed bool
}

func (l *listener) Errorf(string, ...any) { l.failed = true }

func (l *listener) after(f func()) bool {
	Clear(l, "what is dirty", f)
	return l.failed
}
