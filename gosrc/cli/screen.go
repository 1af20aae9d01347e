package cli

// This file writes to standard output and standard error, shows the progress of a command, and stops it if a reader
// closes the pipe.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// ExitPipe is the exit status if the reader of standard output or standard error closes the pipe, as in `overwire ... |
// head`. By default, SIGPIPE would then kill a Go program, which could leave half-written files. overwire cleans up
// first, and the caller ends the process.
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

// unwrapWriter returns the Writer inside a screen. That Writer does not escape text. Other writers are returned
// unchanged.
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

// showProgress shows the job's counters on stderr while a command runs, if stderr is a terminal. The returned function
// stops this and removes the line. It may be called more than once.
func showProgress(c *call) (clear func()) {
	if !isTerminal(c.stderr) {
		return func() {}
	}
	stderr := unwrapWriter(c.stderr) // a screen would escape the line's control characters
	end, exit := make(chan struct{}), make(chan struct{})
	spawn.Go("progress", func() {
		defer close(exit)
		start := time.Now()
		tick := time.NewTicker(200 * time.Millisecond)
		defer tick.Stop()
		width := 0
		defer func() { fmt.Fprintf(stderr, "\r%s\r", strings.Repeat(" ", width)) }()
		for {
			select {
			case <-end:
				return
			case <-tick.C:
				line := progressLine(c.verb.name, c.job.Bytes.Load(), c.job.TotalBytes.Load(), time.Since(start))
				if line == "" {
					continue
				}
				fmt.Fprintf(stderr, "\r%-*s", width, line)
				width = max(width, len(line))
			}
		}
	})
	return sync.OnceFunc(func() { close(end); <-exit })
}

// progressLine returns the line to show, or "" if the total is unknown.
func progressLine(verb string, done, total int64, d time.Duration) string {
	if total <= 0 || done < 0 {
		return ""
	}
	line := fmt.Sprintf("%s  %s of %s  %s", verb, bytesText(done), bytesText(total), rateText(done, d.Seconds()))
	if done > 0 && done < total && d > time.Second {
		remaining := time.Duration(float64(d) * float64(total-done) / float64(done))
		line += fmt.Sprintf("  %s left", remaining.Round(time.Second))
	}
	return line
}

func isTerminal(w io.Writer) bool {
	f := fileOf(w)
	if f == nil {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
