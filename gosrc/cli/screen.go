package cli

// This file writes to standard output and standard error, and handles readers that go away.

import (
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"

	"github.com/overwire/overwire/gosrc/errs"
)

// ExitPipe says that the reader of standard output or standard error has gone, as in
// `overwire ... | head`. Go programs normally end there, possibly with files half written.
// Here the command ends first, and the caller ends the process.
const ExitPipe = 128 + int(syscall.SIGPIPE)

// readers watches the readers of one command line's outlets.
type readers struct {
	gone atomic.Bool
	stop context.CancelFunc
}

// watchReaders returns a context that is cancelled when a reader goes away.
func watchReaders(ctx context.Context) (context.Context, *readers) {
	signal.Ignore(syscall.SIGPIPE)
	ctx, stop := context.WithCancel(ctx)
	return ctx, &readers{stop: stop}
}

// An outlet is standard output or standard error. It prints nothing once a reader has gone.
type outlet struct {
	io.Writer
	readers *readers
}

func (o *outlet) Write(p []byte) (int, error) {
	if o.readers.gone.Load() {
		return 0, syscall.EPIPE
	}
	n, err := o.Writer.Write(p)
	if errors.Is(err, syscall.EPIPE) {
		o.readers.gone.Store(true)
		o.readers.stop()
	}
	return n, err
}

// A screen prints texts to standard output or standard error so that names and contents
// of files cannot control a terminal. Each Write must be whole characters. Binary data
// goes to the Writer itself.
type screen struct{ io.Writer }

func (s screen) Write(p []byte) (int, error) {
	if _, err := io.WriteString(s.Writer, errs.Visible(string(p))); err != nil {
		return 0, err
	}
	return len(p), nil
}

// unwrapWriter returns the writer of a screen, without its locks.
func unwrapWriter(w io.Writer) io.Writer {
	if s, ok := w.(screen); ok {
		return s.Writer
	}
	return w
}

// fileOf returns the file of a screen; nil if there is none.
func fileOf(w io.Writer) *os.File {
	w = unwrapWriter(w)
	if o, ok := w.(*outlet); ok {
		w = o.Writer
	}
	f, _ := w.(*os.File)
	return f
}
