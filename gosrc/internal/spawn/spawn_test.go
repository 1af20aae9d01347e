package spawn_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
)

// quiet captures stderr output and heals the engine afterwards.
func quiet(t *testing.T) *bytes.Buffer {
	t.Helper()
	b := new(bytes.Buffer)
	*spawn.Out = b
	t.Cleanup(func() { *spawn.Out = os.Stderr; spawntest.Heal() })
	return b
}

// A panic becomes an ErrEngine that names the goroutine. The stack is printed only once, and the first panic
// remains the cause.
func TestPanicPoisonsOnce(t *testing.T) {
	b := quiet(t)
	if err := spawn.Poisoned(); err != nil {
		t.Fatalf("poisoned before the first panic: %v", err)
	}
	first := spawn.Guard("load", func() error { panic("first") })
	second := spawn.Guard("save", func() error { var p *int; _ = *p; return nil })
	for _, err := range []error{first, second} {
		if !errors.Is(err, errs.ErrEngine) {
			t.Errorf("%v is not ErrEngine", err)
		}
	}
	if spawn.Poisoned() != first {
		t.Errorf("Poisoned returned %v, want the first panic", spawn.Poisoned())
	}
	if n := strings.Count(b.String(), "[running]:"); n != 1 {
		t.Errorf("%d stacks printed:\n%s", n, b)
	}
	if !strings.Contains(b.String(), "TestPanicPoisonsOnce") {
		t.Errorf("the stack does not contain the test:\n%s", b)
	}
}

// The first panic ends Context, with that panic as the cause. A context created later has also ended.
func TestPanicEndsContext(t *testing.T) {
	quiet(t)
	before := spawn.Context()
	if before.Err() != nil {
		t.Fatal(before.Err())
	}
	first := spawn.Guard("load", func() error { panic("first") })
	_ = spawn.Guard("load", func() error { panic("second") })
	for _, ctx := range []context.Context{before, spawn.Context()} {
		if context.Cause(ctx) != first {
			t.Error(context.Cause(ctx))
		}
	}
	spawntest.Heal()
	_ = spawn.Guard("load", func() error { panic("third") })
	if ctx := spawn.Context(); ctx.Err() == nil {
		t.Error("a context created after the panic has not ended")
	}
}

// Errors and success pass through Guard unchanged.
func TestGuardPassesErrors(t *testing.T) {
	if err := spawn.Guard("x", func() error { return nil }); err != nil {
		t.Error(err)
	}
	if err := spawn.Guard("x", func() error { return errs.ErrKey }); err != errs.ErrKey {
		t.Errorf("got %v", err)
	}
}

// Running and Names count goroutines from start to end, whether they return, panic or call Goexit.
func TestCounter(t *testing.T) {
	quiet(t)
	if n := spawntest.Left(); len(n) != 0 { // from earlier tests
		t.Fatalf("still running: %v", n)
	}
	hold := make(chan struct{})
	var wg sync.WaitGroup
	for _, end := range []func(){func() {}, func() { panic("x") }, runtime.Goexit} {
		wg.Add(1)
		spawn.Go("worker", func() { defer wg.Done(); <-hold; end() })
	}
	if spawn.Running() != 3 || strings.Join(spawn.Names(), " ") != "worker worker worker" {
		t.Errorf("running %d: %v", spawn.Running(), spawn.Names())
	}
	close(hold)
	wg.Wait()
	if n := spawntest.Left(); len(n) != 0 || spawn.Running() != 0 {
		t.Errorf("%d goroutines left: %v", spawn.Running(), n)
	}
}
