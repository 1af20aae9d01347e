package main

// This file is the command line.

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/measure"
)

const usageText = `overwire-rig measures overwire for those who work on it: every figure beside the
floor of the same run, and what the project wants of it.

usage: overwire-rig [%s] [options]
       overwire-rig --device DEVICE [--only PARTS] [options]

--device measures loads to a GPU (or, for comparison, to "cpu") and nothing
else; about 3 minutes, 35 GB of disk and 50 GB of memory. Its parts: %s.
Without it a run needs about twice --size in DIR and three times in memory.
What fails or is not there has a row that says so.

options:
`

func main() {
	knob.Load(knob.Environ())
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := runCommand(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	switch {
	case err == nil || errors.Is(err, flag.ErrHelp):
		return
	case errors.Is(err, errs.ErrCancelled):
		fmt.Fprintln(os.Stderr, "overwire-rig: interrupted")
		os.Exit(130)
	}
	fmt.Fprintf(os.Stderr, "overwire-rig: %s\n", errs.Message(err))
	if errors.Is(err, errs.ErrArgument) {
		os.Exit(2)
	}
	os.Exit(1)
}

// runCommand runs one command line, without the program's name. A report with failures
// is printed, and its error returned.
func runCommand(ctx context.Context, argv []string, stdout, stderr io.Writer) error {
	opt, asJSON, err := parseOptions(argv, stderr)
	if err != nil {
		return err
	}
	if !asJSON { // rows appear as they are measured
		group := ""
		opt.Begin = func(rep *measure.Report) { writeHead(stdout, rep) }
		opt.Row = func(row measure.Row) {
			if row.Group != group {
				group = row.Group
				fmt.Fprintf(stdout, "%s\n", group)
			}
			writeRow(stdout, row)
		}
	}
	rep, err := Run(ctx, nil, opt)
	if err != nil && len(rep.Failures) == 0 {
		return err
	}
	if !asJSON {
		fmt.Fprintf(stdout, "%.0f s\n", rep.Seconds)
		return err
	}
	b, wrong := json.MarshalIndent(rep, "", "  ")
	if wrong == nil {
		_, wrong = fmt.Fprintf(stdout, "%s\n", b)
	}
	return errors.Join(err, wrong)
}

// parseOptions reads the options; they may stand before or after what is measured.
func parseOptions(argv []string, stderr io.Writer) (opt Options, asJSON bool, err error) {
	f := flag.NewFlagSet("overwire-rig", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.Usage = func() {
		fmt.Fprintf(stderr, usageText, strings.Join(Whats, "|"), strings.Join(Parts, ","))
		f.PrintDefaults()
	}
	f.Func("size", "tensor bytes of the load rows: 4GB, 512MiB (default 4GB; of a device 16.06GB)",
		func(text string) error {
			n, err := humanize.ParseBytes(text)
			if err == nil && (n == 0 || n > 1<<50) {
				err = errors.New("not a size like 4GB or 512MiB")
			}
			opt.Size = int64(n)
			return err
		})
	f.StringVar(&opt.Device, "device", "", "measure loads to cuda, cuda:1, cpu")
	f.Func("only", "of the device's rows these parts, joined by commas", func(text string) error {
		opt.Only = strings.Split(text, ",")
		return nil
	})
	limit := f.Int("limit", 0, "of the device's rows: begin nothing more after that many seconds (default 450)")
	f.StringVar(&opt.Out, "out", "", "`file` that gets the report as JSON too, anew after every row")
	f.StringVar(&opt.Trace, "trace", "", "`file` that gets a Chrome trace of one load")
	f.StringVar(&opt.File, "file", "", "`file` of real F32 weights for the codec rows")
	f.IntVar(&opt.Repeat, "repeat", 0, "runs of each measurement (default 5)")
	f.StringVar(&opt.Dir, "dir", "", "`folder` for temporary files")
	f.IntVar(&opt.Threads, "threads", 0, "cores to use (default all)")
	f.BoolVar(&asJSON, "json", false, "print one JSON document for machines")
	if len(argv) > 0 && !strings.HasPrefix(argv[0], "-") {
		opt.What, argv = argv[0], argv[1:]
	}
	if err := f.Parse(argv); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return opt, false, err
		}
		return opt, false, errs.New(errs.ErrArgument, "%v", err)
	}
	switch {
	case f.NArg() == 1 && opt.What == "":
		opt.What = f.Arg(0)
	case f.NArg() > 0:
		return opt, false, errs.New(errs.ErrArgument, "it measures one thing: %s", strings.Join(Whats, ", "))
	}
	if opt.Device == "" && (opt.Only != nil || *limit != 0) {
		return opt, false, errs.New(errs.ErrArgument, "--only and --limit go with --device")
	}
	if opt.Repeat < 0 || opt.Threads < 0 || *limit < 0 {
		return opt, false, errs.New(errs.ErrArgument, "--repeat, --threads and --limit are positive numbers")
	}
	opt.Limit = time.Duration(*limit) * time.Second
	return opt, asJSON, opt.checkOptions()
}
