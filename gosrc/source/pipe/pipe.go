// Package pipe provides sources for bodies that another program downloads. The program receives URLs as arguments and
// writes their bodies, in that order, to its standard output, as curl and `overwire fetch` do.
//
// The program is started by its path, without a shell. Every argument begins with http:// or https://, so no URL can be
// mistaken for an option. If the program exits with an error, writes too few or too many bytes, or stalls, every source
// that is not yet complete fails. The last source completes only after the program has succeeded. A caller that has
// read all sources therefore knows that the stream was divided at the right offsets. If the size is unknown, no byte is
// used before the program has succeeded. Closing the last source kills the program and its process group.
package pipe

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/route"
	"github.com/overwire/overwire/gosrc/source/spool"
)

// A Source is the body of one URL. It implements source.Source.
type Source struct {
	*spool.File
	d    *download
	once sync.Once
	shut error
}

type download struct {
	cancel context.CancelCauseFunc
	ended  chan struct{}
	mu     sync.Mutex
	refs   int
}

// Open downloads one URL with a program.
func Open(ctx context.Context, program, uri string, opt source.Options) (*Source, error) {
	srcs, err := Start(ctx, program, []string{uri}, nil, opt)
	if err != nil {
		return nil, err
	}
	return srcs[0], nil
}

// Start runs the program for several URLs and returns a source for each. sizes are the sizes of the bodies.
// sizes may be nil for a single URL of unknown size; Start then waits until the program has ended.
func Start(ctx context.Context, program string, urls []string, sizes []int64, opt source.Options) ([]*Source, error) {
	fail := func(uri string, err error) ([]*Source, error) { return nil, errs.In("open", uri, err) }
	if len(urls) == 0 || sizes != nil && len(sizes) != len(urls) || sizes == nil && len(urls) != 1 {
		return fail("", errs.New(errs.ErrArgument, "got %d URLs and %d sizes: expected one size for each URL",
			len(urls), len(sizes)))
	}
	timeout, err := opt.Number("timeout", 30, 0.01, 86400)
	if err != nil {
		return fail(urls[0], err)
	}
	for i, u := range urls {
		scheme := source.Scheme(u)
		switch {
		case scheme != "http" && scheme != "https" || strings.ContainsAny(u, "\x00\r\n"):
			return fail(u, errs.New(errs.ErrArgument,
				"expected an http:// or https:// URL without NUL characters and line breaks"))
		case sizes != nil && sizes[i] < 0:
			return fail(u, errs.New(errs.ErrArgument, "invalid size %d: expected 0 or more bytes", sizes[i]))
		}
		if err := opt.Check(scheme, "timeout"); err != nil {
			return fail(u, fmt.Errorf("%w: an external downloader supports only the option timeout", err))
		}
	}
	files := make([]*spool.File, 0, len(urls))
	closeAll := func() {
		for _, f := range files {
			_ = f.Close()
		}
	}
	for i, u := range urls {
		f, err := spool.New(u, source.Outline{})
		if err != nil {
			closeAll()
			return fail(u, err)
		}
		if sizes != nil {
			f.Expect(sizes[i])
		}
		files = append(files, f)
	}
	run, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	d := &download{cancel: cancel, ended: make(chan struct{}), refs: len(urls)}
	spawn.Go("downloader", func() {
		defer close(d.ended)
		err := spawn.Guard("downloader", func() error {
			return runProgram(run, program, urls, files, time.Duration(timeout*float64(time.Second)), opt.Env)
		})
		for _, f := range files {
			f.End(err)
		}
	})
	if sizes == nil {
		if err := files[0].Sized(ctx); err != nil {
			cancel(err)
			<-d.ended
			closeAll()
			if ctx.Err() != nil {
				return nil, err
			}
			return fail(urls[0], err)
		}
	}
	srcs := make([]*Source, len(files))
	for i, f := range files {
		srcs[i] = &Source{File: f, d: d}
	}
	return srcs, nil
}

// Close closes the source. Closing the last one ends the program.
func (s *Source) Close() error {
	s.once.Do(func() {
		s.d.mu.Lock()
		s.d.refs--
		last := s.d.refs == 0
		s.d.mu.Unlock()
		if last {
			s.d.cancel(errs.New(errs.ErrArgument, "the source is closed"))
			<-s.d.ended
		}
		s.shut = s.File.Close()
	})
	return s.shut
}

// argumentsOf returns the program's arguments and its standard input. Without options, curl would return error
// pages as if they were weights. The options make it fail on an error status, stop at the first URL that fails,
// follow redirects and print no progress. curl does not check where a redirect leads. Redirects are therefore
// limited to https, because a server in a private network has no certificate for a public name. They may also
// use http if all URLs are addresses in private networks. curl does not send the user and password of a URL to
// other hosts. Every user of the machine can read arguments, so URLs with a user or a query, which may be
// secret, are passed to curl on its standard input. Other programs do not support this.
func argumentsOf(program string, urls []string) (args []string, stdin string) {
	if filepath.Base(program) != "curl" {
		return urls, ""
	}
	inside, private := true, false
	for _, text := range urls {
		u, err := url.Parse(text)
		inside = inside && err == nil && strings.EqualFold(u.Scheme, "http") && route.Inside(u.Hostname())
		private = private || strings.ContainsAny(text, "@?")
	}
	proto := "=https"
	if inside {
		proto = "=http,https"
	}
	args = []string{"--fail", "--fail-early", "--silent", "--show-error", "--location", "--max-redirs", "5", "--proto",
		"=http,https", "--proto-redir", proto, "--globoff"}
	if !private {
		return append(append(args, "--"), urls...), ""
	}
	var config strings.Builder
	quoter := strings.NewReplacer(`\`, `\\`, `"`, `\"`)
	for _, u := range urls {
		fmt.Fprintf(&config, "url = \"%s\"\n", quoter.Replace(u))
	}
	return append(args, "--config", "-"), config.String()
}

// runProgram runs the program to its end and divides its output among files.
func runProgram(ctx context.Context, program string, urls []string, files []*spool.File, timeout time.Duration,
	env map[string]string) error {
	r, w, err := os.Pipe()
	if err != nil {
		return errs.FromOS(err)
	}
	defer r.Close()
	// A pipe larger than the default of 64 KiB needs fewer context switches. An error is ignored, because the
	// default also works.
	_, _ = unix.FcntlInt(w.Fd(), unix.F_SETPIPE_SZ, 1<<20)
	args, stdin := argumentsOf(program, urls)
	cmd := exec.Command(program, args...)
	if stdin != "" {
		cmd.Stdin = strings.NewReader(stdin)
	}
	cmd.Env = cmd.Environ()
	for k, v := range env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	stderr := &tail{}
	lines := &redacted{to: stderr}
	cmd.Stdout, cmd.Stderr = w, lines
	if path := knob.DownloaderLog.Get(); path != "" {
		log, err := openLog(path)
		if err != nil {
			_ = w.Close()
			return fmt.Errorf("%s=%s: %w", knob.DownloaderLog.Name(), path, errs.FromOS(err))
		}
		defer log.Close()
		lines.to = io.MultiWriter(stderr, log)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err = cmd.Start()
	_ = w.Close()
	if err != nil {
		return errs.FromOS(err)
	}
	kill := func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	stop := context.AfterFunc(ctx, func() { kill(); _ = r.SetReadDeadline(time.Now()) })
	defer stop()
	last, file, cutErr := cutStream(r, files, timeout)
	if cutErr != nil {
		kill()
	}
	_ = r.Close() // before Wait, so that a program that continues to write gets SIGPIPE
	waitErr := cmd.Wait()
	_ = lines.flushLine()
	kill() // kill the program's remaining children
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case cutErr != nil && !errors.Is(cutErr, errEnd):
		return cutErr
	case waitErr != nil:
		return errs.New(errs.ErrIO, "%s: %v%s", filepath.Base(program), waitErr, stderr)
	case cutErr != nil:
		var have, size int64
		for _, f := range files {
			have, size = have+f.Have(), size+f.Size()
		}
		return errs.New(errs.ErrCorrupt, "truncated: %s ended after %d of %d bytes%s", filepath.Base(program), have,
			size, stderr)
	case file != nil:
		return last.Append(file)
	}
	return nil
}

// openLog opens a log for appending. Other users may be able to write to its folder, so it does not follow symbolic
// links. It refuses files of other users, who could read the log, and pipes, whose readers might block the program.
func openLog(path string) (*os.File, error) {
	log, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	st, err := log.Stat()
	if err == nil && st.Mode()&os.ModeNamedPipe != 0 {
		err = errs.New(errs.ErrArgument, "this is a pipe: expected a regular file")
	}
	if err == nil {
		err = refuseOthers(path, st)
	}
	if err != nil {
		_ = log.Close()
		return nil, err
	}
	return log, nil
}

// refuseOthers refuses an open file that another user created in a world-writable folder.
func refuseOthers(path string, st os.FileInfo) error {
	folder, err := os.Stat(regular.FolderOf(path))
	if err != nil {
		return err
	}
	return regular.RefusePlantedFile(path, st, folder)
}

var errEnd = errors.New("the stream ended early")

// cutStream divides the stream among the files. It withholds the last byte, so that the last file is complete
// only after the program has succeeded.
func cutStream(r *os.File, files []*spool.File, timeout time.Duration) (last *spool.File, held []byte, err error) {
	for _, f := range files {
		if f.Size() > 0 {
			last = f
		}
	}
	buf := make([]byte, 1<<20)
	at := 0
	whole := func() {
		for at < len(files) && files[at].Size() >= 0 &&
			(files[at].Have() == files[at].Size() || files[at] == last && held != nil) {
			at++
		}
	}
	whole()
	for {
		_ = r.SetReadDeadline(time.Now().Add(timeout))
		n, err := r.Read(buf)
		for b := buf[:n]; len(b) > 0; whole() {
			if at == len(files) {
				return nil, nil, errs.New(errs.ErrCorrupt,
					"the downloader wrote more than the %d requested bodies", len(files))
			}
			f := files[at]
			k := int64(len(b))
			if size := f.Size(); size >= 0 {
				k = min(k, size-f.Have())
			}
			part := b[:k]
			if f == last && f.Have()+k == f.Size() {
				part, held = b[:k-1], []byte{b[k-1]}
			}
			if err := f.Append(part); err != nil {
				return nil, nil, err
			}
			b = b[k:]
		}
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil, nil, errs.New(errs.ErrTimeout, "the downloader made no progress in %v", timeout)
		case err == io.EOF && (at == len(files) || files[at].Size() < 0):
			return last, held, nil
		case err == io.EOF:
			return nil, nil, errEnd
		case err != nil:
			return nil, nil, errs.FromOS(err)
		}
	}
}

// maxLine is the longest line of a program's standard error that is shown. Longer lines would be shown in
// parts, and Redact cannot recognize a secret if a part begins within it.
const maxLine = 64 << 10

// redacted writes whole lines with their secrets removed.
type redacted struct {
	to   io.Writer
	b    []byte
	long bool // the line that b continues is longer than maxLine and is omitted
}

func (r *redacted) Write(p []byte) (int, error) {
	r.b = append(r.b, p...)
	end := bytes.LastIndexAny(r.b, "\r\n") + 1
	rest := bytes.Clone(r.b[end:])
	if r.b = r.b[:end]; end > 0 {
		if err := r.flushLine(); err != nil {
			return 0, err
		}
	}
	if r.b = rest; len(rest) > maxLine {
		r.b, r.long = nil, true
	}
	return len(p), nil
}

// flushLine writes the buffered line.
func (r *redacted) flushLine() error {
	text, note := r.b, ""
	if r.long {
		note = fmt.Sprintf("(omitted a line of more than %d bytes)\n", maxLine)
		text = text[bytes.IndexAny(text, "\r\n")+1:]
	}
	r.b, r.long = nil, false
	_, err := io.WriteString(r.to, note+errs.Redact(string(text)))
	return err
}

// tail keeps the end of a program's standard error. Its input is already redacted, because cutting first could
// remove the text by which a secret is recognized.
type tail struct {
	mu sync.Mutex
	b  []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, p...)
	t.b = t.b[max(0, len(t.b)-1000):]
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	lines := bytes.Fields(t.b)
	if len(lines) == 0 {
		return ""
	}
	return ": " + string(bytes.Join(lines, []byte(" ")))
}
