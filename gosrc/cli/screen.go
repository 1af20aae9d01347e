package cli

// This file writes to standard output and standard error, and stops the command if a reader closes the pipe.

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

// ExitPipe is the exit status if the reader of standard output or standard error closes the
// pipe, as in `overwire ... | head`. By default, SIGPIPE would kill a Go program there, possibly
// with half-written files. Here the command cleans up first, and the caller ends the process.
const ExitPipe = 128 + int(syscall.SIGPIPE)

// readers records whether a reader of the command's output has closed its pipe.
type readers struct {
	gone atomic.Bool
	stop context.CancelFunc
}

// watchReaders returns a context that is cancelled when a reader closes its pipe.
func watchReaders(ctx context.Context) (context.Context, *readers) {
	signal.Ignore(syscall.SIGPIPE)
	ctx, stop := context.WithCancel(ctx)
	return ctx, &readers{stop: stop}
}

// An outlet is standard output or standard error. It prints nothing after a reader has closed its pipe.
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

// A screen escapes control characters in the text that it prints, so file names and contents cannot control the
// terminal. Each Write must contain whole UTF-8 characters. Binary data must be written to the underlying Writer.
type screen struct{ io.Writer }

func (s screen) Write(p []byte) (int, error) {
	if _, err := io.WriteString(s.Writer, errs.Visible(string(p))); err != nil {
		return 0, err
	}
	return len(p), nil
}

// unwrapWriter returns the writer under a screen, which does not escape text.
func unwrapWriter(w io.Writer) io.Writer {
	if s, ok := w.(screen); ok {
		return s.Writer
	}
	return w
}

// fileOf returns the file that w writes to, or nil if w does not write to a file.
func fileOf(w io.Writer) *os.File {
	w = unwrapWriter(w)
	if o, ok := w.(*outlet); ok {
		w = o.Writer
	}
	f, _ := w.(*os.File)
	return f
}
