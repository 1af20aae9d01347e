// Package cli implements the `overwire` command. It does not need Python. The Python
// package's console script and the tests call Main.
//
// Results go to stdout, as text or, with --json, as one JSON document. Everything else
// goes to stderr. The exit status tells the kind of failure (see Help).
package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/overwire/overwire/gosrc/convert"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/internal/rawjson"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/verify"
	"golang.org/x/sys/unix"
)

// Version is the version of the engine and of the Python package: the build reads it
// here, and `make gen` writes it for Python.
const Version = "0.1.0"

// The exit statuses.
const (
	ExitOK           = 0
	ExitBad          = 1   // the data is corrupt, or not in this format
	ExitUsage        = 2   // the command line is wrong
	ExitNotFound     = 3   // no such file or tensor, or no permission
	ExitIO           = 4   // reading or writing failed: disk full, timeout, out of memory
	ExitNotSupported = 5   // valid, but not supported by this build or machine
	ExitEngine       = 6   // a bug in overwire
	ExitInterrupted  = 130 // cancelled, e.g. by Ctrl-C
)

const exitText = `exit status:
  0  success
  1  the data is corrupt, or not in this format
  2  the command line is wrong
  3  no such file or tensor, or no permission
  4  reading or writing failed: disk full, timeout, out of memory
  5  not supported by this build or machine
  6  a bug in overwire
  130  interrupted
`

// Env holds what only the caller knows about Python and the environment. Every field may be empty.
type Env struct {
	Python        string // sys.executable, for doctor
	PythonVersion string
	Storage       source.Options // store options from the environment; --storage adds to them
	// Secrets are the environment variables that arguments can name as env:NAME.
	Secrets map[string]string
	// Copies are the sources that were converted to a temporary copy for this command. Reports describe the originals.
	Copies verify.Copies
}

// A call is one run of a command.
type call struct {
	ctx            context.Context
	job            *job.Job
	env            Env
	stdout, stderr io.Writer
	arguments
	verbs        []*verb       // all commands, for help and completion
	storage      format.Access // how files are reached
	clear        func()        // removes the progress line
	outputChosen bool          // the command, not the user, chose the output
}

// errHelp is what parse returns for --help.
var errHelp = errors.New("help")

// Main runs one command line (without the program's name) and returns the exit status.
// The job's counters show its progress; j may be nil. Main returns soon after ctx is
// cancelled or the reader of its output closes the pipe. Call knob.Load first.
func Main(ctx context.Context, j *job.Job, argv []string, stdout, stderr io.Writer, env Env) int {
	signal.Ignore(syscall.SIGPIPE)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	readers := &readers{stop: stop} // it cancels ctx when a reader closes its pipe
	status := runLine(ctx, j, argv, screen{&outlet{stdout, readers}}, screen{&outlet{stderr, readers}}, env)
	if readers.gone.Load() {
		return ExitPipe
	}
	return status
}

func runLine(ctx context.Context, j *job.Job, argv []string, stdout, stderr io.Writer, env Env) int {
	if j == nil {
		j = job.New("cli")
	}
	first := slices.IndexFunc(argv, func(word string) bool { return word != "--json" })
	if first < 0 {
		fmt.Fprint(stderr, Help())
		return ExitUsage
	}
	if first > 0 { // --json before the command
		argv = slices.Insert(slices.Clone(argv[first:]), 1, argv[:first]...)
	}
	switch argv[0] {
	case "-h", "--help", "help":
		return help(argv[1:], stdout, stderr)
	case "-V", "--version":
		return printVersion(argv[1:], stdout, stderr)
	}
	v := findVerb(argv[0])
	if v == nil {
		return failed(stderr, stdout, slices.Contains(argv, "--json"), noVerb(argv[0]))
	}
	of := arguments{verb: v}
	c := &call{ctx: ctx, job: j, env: env, stdout: stdout, stderr: stderr, arguments: of, verbs: verbs()}
	err := c.parse(argv[1:])
	if errors.Is(err, errHelp) {
		return failed(stderr, stdout, false, printText(stdout, v.help()))
	}
	if err == nil {
		err = c.takePaths()
	}
	if err == nil {
		err = c.access()
	}
	if err == nil {
		c.clear = showProgress(c)
		err = c.interrupted(v.run(c))
		c.clear()
		for _, text := range source.Notices() {
			fmt.Fprintf(stderr, "overwire: %s\n", text)
		}
	}
	return failed(stderr, stdout, c.is("json"), err)
}

// access sets c.storage: keys, and store options from --storage and the environment.
func (c *call) access() (err error) {
	c.storage.Options = c.env.Storage
	if c.storage.Decrypt, err = c.keys("decrypt", c.env.Secrets); err != nil {
		return err
	}
	if c.storage.Encrypt, err = c.keys("encrypt", c.env.Secrets); err != nil {
		return err
	}
	text, ok := c.opts["storage"]
	if !ok {
		return nil
	}
	if c.storage.Storage, err = storageTexts(text); err != nil {
		return err
	}
	if on, _ := c.storage.Flag("insecure"); on {
		fmt.Fprintln(c.stderr, "overwire: insecure: certificates are not checked, so anyone on the network path "+
			"can change the weights")
	}
	return nil
}

// takePaths replaces file:// URIs with their paths.
func (c *call) takePaths() (err error) {
	words := []*string{}
	for i := range c.args {
		words = append(words, &c.args[i])
	}
	out := c.opts["output"]
	for _, word := range append(words, &out) {
		if source.Scheme(*word) == "file" {
			if *word, err = source.FilePath(*word); err != nil {
				return err
			}
		}
	}
	if c.opts["output"] != "" {
		c.opts["output"] = out
	}
	return nil
}

// printVersion prints the answer to `overwire --version`, which takes only --json.
func printVersion(rest []string, stdout, stderr io.Writer) int {
	asJSON := slices.Contains(rest, "--json")
	switch {
	case slices.ContainsFunc(rest, func(word string) bool { return word != "--json" }):
		return failed(stderr, stdout, asJSON, usage("--version takes no option except --json"))
	case asJSON:
		return failed(stderr, stdout, true, writeJSON(stdout,
			map[string]string{"version": Version, "go": runtime.Version()}))
	}
	return failed(stderr, stdout, false, printText(stdout, "overwire "+Version+"\n"))
}

func help(about []string, stdout, stderr io.Writer) int {
	if len(about) == 0 {
		return failed(stderr, stdout, false, printText(stdout, Help()))
	}
	v := findVerb(about[0])
	if v == nil {
		return failed(stderr, stdout, false, noVerb(about[0]))
	}
	return failed(stderr, stdout, false, printText(stdout, v.help()))
}

func noVerb(name string) error {
	if instead := elsewhere[name]; instead != "" {
		return usage("unknown command %q: write %s", name, instead)
	}
	return usage("unknown command %q%s; see: overwire --help", name, nearName(name, verbNames(verbs())))
}

// A usageError is a wrong command line. Its text says what to write instead.
type usageError struct{ text string }

func (e *usageError) Error() string { return e.text }

func (e *usageError) Unwrap() error { return errs.ErrArgument }

// A shownError is an error that the printed result already reports. With --json that result stays the only document.
type shownError struct{ error }

func (e *shownError) Unwrap() error { return e.error }

func usage(format string, args ...any) error { return &usageError{fmt.Sprintf(format, args...)} }

// failed prints an error and returns its exit status.
func failed(stderr, stdout io.Writer, asJSON bool, err error) int {
	if err == nil {
		return ExitOK
	}
	text := errs.Message(err)
	if stop, ok := errors.AsType[*interruption](err); ok {
		text = "interrupted" + stop.left
	}
	fmt.Fprintf(stderr, "overwire: %s\n", text)
	var report *shownError
	if asJSON && !errors.As(err, &report) {
		_ = writeJSON(stdout, map[string]any{"error": failure(err, text)})
	}
	return status(err)
}

// An interruption is the error of a command that the user has cancelled.
type interruption struct {
	error
	left string // which files the command has written
}

func (i *interruption) Unwrap() error { return i.error }

// interrupted adds the names of the files that the command has already written, if err is a cancellation.
func (c *call) interrupted(err error) error {
	if err == nil || status(err) != ExitInterrupted {
		return err
	}
	remainder := ""
	var part *convert.Partial
	switch _, writes := c.opts["output"]; {
	case errors.As(err, &part):
		remainder = "; written before that: " + errs.OneLine(strings.Join(part.Files, ", "))
	case errs.RuleOf(err) == errs.RuleRemains: // the error lists the objects
	case writes && c.verb.name != "fetch": // fetch's error lists what it has kept
		remainder = "; nothing was written"
	}
	return &interruption{err, remainder}
}

// failure returns an error in the form that --json prints.
func failure(err error, text string) map[string]any {
	f := map[string]any{"class": errs.Class(err), "message": text, "status": status(err)}
	if at, ok := errors.AsType[*errs.At](err); ok {
		f["source"] = errs.RedactURI(at.Source)
		if at.Tensor != "" {
			f["tensor"] = at.Tensor
		}
		if at.Chunk >= 0 {
			f["chunk"] = at.Chunk
		}
		if at.Offset >= 0 {
			f["offset"] = at.Offset
		}
	}
	return f
}

// statuses maps each error class to its exit status. The first match wins.
var statuses = []struct {
	err    error
	status int
}{
	{errs.ErrCancelled, ExitInterrupted},
	{context.Canceled, ExitInterrupted},
	{errs.ErrCorrupt, ExitBad},
	{errs.ErrFormat, ExitBad},
	{errs.ErrNotFound, ExitNotFound},
	{errs.ErrPermission, ExitNotFound},
	{errs.ErrKey, ExitNotFound},
	{errs.ErrIO, ExitIO},
	{errs.ErrTimeout, ExitIO},
	{errs.ErrMemory, ExitIO},
	{errs.ErrNotSupported, ExitNotSupported},
	{errs.ErrDevice, ExitNotSupported},
	{errs.ErrCrypto, ExitBad},
	{errs.ErrBase, ExitBad},
	{errs.ErrArgument, ExitUsage},
}

func status(err error) int {
	for _, s := range statuses {
		if errors.Is(err, s.err) {
			return s.status
		}
	}
	return ExitEngine
}

// show removes the progress line and prints a result, as JSON with --json, otherwise as text.
func (c *call) show(v any, text func(w io.Writer)) error {
	c.clear()
	if c.is("json") {
		return writeJSON(c.stdout, v)
	}
	if c.is("quiet") {
		return nil
	}
	b := &strings.Builder{}
	text(b)
	return printText(c.stdout, b.String())
}

func printText(stdout io.Writer, text string) error {
	if _, err := io.WriteString(stdout, text); err != nil {
		return errs.New(errs.ErrIO, "standard output: %v", err)
	}
	return nil
}

func writeJSON(w io.Writer, v any) error {
	b, err := rawjson.Marshal(v)
	if err != nil {
		return errs.New(errs.ErrEngine, "cannot encode the result as JSON: %v", err)
	}
	var text bytes.Buffer
	_ = json.Indent(&text, b, "", "  ") // cannot fail: b is valid JSON
	text.WriteByte('\n')
	if _, err := w.Write(text.Bytes()); err != nil {
		return errs.New(errs.ErrIO, "standard output: %v", err)
	}
	return nil
}

// ExitPipe is the exit status if the reader of standard output or standard error closes the pipe, as in `overwire ... |
// head`. By default, SIGPIPE would then kill a Go program, which could leave half-written files. overwire cleans up
// first, and the caller ends the process.
const ExitPipe = 128 + int(syscall.SIGPIPE)

// readers records whether a reader of the command's output has closed its pipe.
type readers struct {
	gone atomic.Bool
	stop context.CancelFunc
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
