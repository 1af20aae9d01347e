package cli

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// progress shows the job on stderr while a verb runs, if people look there,
// and returns what takes the line away again.
func (c *call) progress() (stop func()) {
	if !terminal(c.stderr) {
		return func() {}
	}
	end, gone := make(chan struct{}), make(chan struct{})
	spawn.Go("progress", func() {
		defer close(gone)
		start := time.Now()
		tick := time.NewTicker(200 * time.Millisecond)
		defer tick.Stop()
		shown := 0
		defer func() { fmt.Fprintf(c.stderr, "\r%s\r", strings.Repeat(" ", shown)) }()
		for {
			select {
			case <-end:
				return
			case <-tick.C:
				line := progressLine(c.verb.name, c.job.Bytes.Load(), c.job.TotalBytes.Load(), time.Since(start))
				if line == "" {
					continue
				}
				fmt.Fprintf(c.stderr, "\r%-*s", shown, line)
				shown = max(shown, len(line))
			}
		}
	})
	return func() { close(end); <-gone }
}

// progressLine is empty as long as there is nothing to tell.
func progressLine(verb string, done, total int64, d time.Duration) string {
	if total <= 0 || done < 0 {
		return ""
	}
	line := fmt.Sprintf("%s  %s of %s  %s", verb, bytesText(done), bytesText(total), rateText(done, d.Seconds()))
	if done > 0 && done < total && d > time.Second {
		left := time.Duration(float64(d) * float64(total-done) / float64(done))
		line += fmt.Sprintf("  %s left", left.Round(time.Second))
	}
	return line
}

// terminal says whether a writer is one.
func terminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
