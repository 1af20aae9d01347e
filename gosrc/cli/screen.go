package cli

// This file has what texts are printed to, and what happens when no one reads them any more.

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

// ExitPipe says that the reader of standard output or standard error has gone, as
// `overwire ... | head` has it. By default Go, like other programs, ends the process there,
// with files half written: here the verb ends first, and the caller ends the process.
const ExitPipe = 128 + int(syscall.SIGPIPE)

// readers are those of the outlets of one command line.
type readers struct {
	gone atomic.Bool
	stop context.CancelFunc
}

// watchReaders returns a context that ends when a reader goes.
func watchReaders(ctx context.Context) (context.Context, *readers) {
	signal.Ignore(syscall.SIGPIPE)
	ctx, stop := context.WithCancel(ctx)
	return ctx, &readers{stop: stop}
}

// An outlet is standard output or standard error. Nothing is printed once a reader has gone.
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

// A screen is standard output or standard error for texts, in which names of files and
// objects, and what files contain, may not control a terminal. Each Write is whole
// characters. What is no text goes to the Writer itself.
type screen struct{ io.Writer }

func (s screen) Write(p []byte) (int, error) {
	if _, err := io.WriteString(s.Writer, errs.Visible(string(p))); err != nil {
		return 0, err
	}
	return len(p), nil
}

// unwrapWriter is the writer behind a screen, without its locks.
func unwrapWriter(w io.Writer) io.Writer {
	if s, ok := w.(screen); ok {
		return s.Writer
	}
	return w
}

// fileOf is the file behind a screen; nil if there is none.
func fileOf(w io.Writer) *os.File {
	w = unwrapWriter(w)
	if o, ok := w.(*outlet); ok {
		w = o.Writer
	}
	f, _ := w.(*os.File)
	return f
}
