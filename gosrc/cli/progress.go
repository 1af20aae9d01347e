package cli

// This file shows the progress of a command on a terminal.

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// progress shows the job's counters on stderr while a command runs, if stderr is a terminal. The returned function
// stops this and removes the line. It may be called more than once.
func (c *call) progress() (clear func()) {
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
