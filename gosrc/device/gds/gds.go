// Package gds reads files with GPUDirect Storage: NVIDIA's library libcufile reads a file directly into a GPU's memory,
// with the kernel module nvidia-fs. Without the module the library silently copies through host memory. Probe reports
// whether GPUDirect Storage really works on this machine.
//
// Probe loads libcufile, if it is installed, and only calls its version function. The first Open opens its driver,
// which may take seconds, creates a CUDA context on each GPU and leaves a log file in the working directory. Therefore
// GPUDirect Storage is only used on request.
//
// All functions are safe for concurrent use. Open, Register and ReadInto need the GPU's context to be current on
// their thread.
package gds

import (
	"fmt"
	"os"
	"strings"
	"sync"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// A Report is the result of Probe.
type Report struct {
	Usable  bool   `json:"usable"`  // library and kernel module are present
	Why     string `json:"why"`     // why it cannot be used, or how it is used
	Library string `json:"library"` // name of the libcufile that was found, or ""
	Version string `json:"version"` // version of the library such as "1.13", or "" if it does not report one
	Module  string `json:"module"`  // version of the kernel module nvidia-fs, or "" if it is not loaded
}

// found caches what is known about this machine.
var found struct {
	mu      sync.Mutex
	places  places
	report  *Report // nil before Probe has run
	opened  bool    // there was an attempt to open libcufile's driver
	refused error   // error of that attempt, if any
}

// places holds the names to search for.
type places struct {
	libraries []string
	module    string // file that contains the module's version
}

var usual = places{[]string{"libcufile.so.0", "libcufile.so"}, "/proc/driver/nvidia-fs/version"}

// Use makes Probe search for a different library and module until end is called, for tests of other packages. Files
// must be closed before end.
func Use(library, module string) (end func()) {
	set := func(p places) {
		found.mu.Lock()
		defer found.mu.Unlock()
		found.places, found.report, found.opened, found.refused = p, nil, false, nil
	}
	set(places{[]string{library}, module})
	return func() { set(places{}) }
}

// Probe searches once and caches the result.
func Probe() Report {
	found.mu.Lock()
	defer found.mu.Unlock()
	return look()
}

// look implements Probe. The caller holds found.mu.
func look() (r Report) {
	if found.report != nil {
		return *found.report
	}
	at := found.places
	if at.libraries == nil {
		at = usual
	}
	err := spawn.Guard("gds", func() error {
		r = probe(at.libraries, at.module)
		return nil
	})
	if err != nil {
		r = Report{Why: err.Error()}
	}
	found.report = &r
	return r
}

// begin opens libcufile's driver once. An error is errs.ErrNotSupported, with a text about what is missing.
func begin() error {
	found.mu.Lock()
	defer found.mu.Unlock()
	r := look()
	if !r.Usable {
		return errs.New(errs.ErrNotSupported, "no GPUDirect Storage: %s", r.Why)
	}
	if !found.opened {
		found.opened = true
		if err := openDriver(); err != nil {
			found.refused = errs.New(errs.ErrNotSupported, "no GPUDirect Storage: %s: %v", r.Library, err)
		}
	}
	return found.refused
}

// probe searches for the first of the libraries and for the file with the module's version.
func probe(libraries []string, module string) (r Report) {
	why := "libcufile was not found"
	for _, name := range libraries {
		version, err := library(name)
		if err == nil {
			r.Library = name
			if version > 0 {
				r.Version = fmt.Sprintf("%d.%d", version/1000, version%1000/10)
			}
			break
		}
		why = err.Error()
	}
	if b, err := os.ReadFile(module); err == nil {
		line, _, _ := strings.Cut(string(b), "\n")
		if _, after, ok := strings.Cut(line, ":"); ok {
			line = after
		}
		if r.Module = strings.TrimSpace(line); r.Module == "" {
			r.Module = "unknown"
		}
	}
	switch {
	case r.Library == "" && r.Module == "":
		r.Why = "neither libcufile nor the kernel module nvidia-fs was found"
	case r.Library == "":
		r.Why = why
	case r.Module == "":
		r.Why = "the kernel module nvidia-fs is not loaded: libcufile would copy through host memory (its " +
			"compatibility mode)"
	default:
		r.Usable = true
		r.Why = "libcufile and the kernel module nvidia-fs are present; run gdscheck -p to see which file systems " +
			"support GPUDirect Storage"
	}
	return r
}
