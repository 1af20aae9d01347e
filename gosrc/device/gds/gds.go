// Package gds tells whether GPUDirect Storage, reading from the disk straight
// into a GPU's memory, is real on this machine. Overwire does not read by it:
// without the kernel module nvidia-fs, NVIDIA's library libcufile goes through
// host memory and says nothing about it, so the one thing that users need is a
// truthful answer.
//
// Asking loads libcufile, if there is one, and calls nothing of it but its
// version: opening its driver would take seconds, a CUDA context and a log file
// in the working directory.
package gds

import (
	"fmt"
	"os"
	"strings"
	"sync"

	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// A Report is what was found.
type Report struct {
	Real    bool   `json:"real"`    // library and kernel module are there
	Why     string `json:"why"`     // in words
	Library string `json:"library"` // libcufile as it was found; "" without one
	Version string `json:"version"` // of the library, "1.13"; "" if it does not say
	Module  string `json:"module"`  // version of the kernel module nvidia-fs; "" if it is not loaded
}

// Probe looks once and remembers. It is safe for concurrent use.
var Probe = sync.OnceValue(func() (r Report) {
	err := spawn.Guard("gds", func() error {
		r = probe([]string{"libcufile.so.0", "libcufile.so"}, "/proc/driver/nvidia-fs/version")
		return nil
	})
	if err != nil {
		return Report{Why: err.Error()}
	}
	return r
})

// probe looks for the first of the libraries and for the file by which the
// module says its version.
func probe(libraries []string, module string) (r Report) {
	why := "no libcufile"
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
		r.Why = "neither libcufile nor the kernel module nvidia-fs"
	case r.Library == "":
		r.Why = why
	case r.Module == "":
		r.Why = "the kernel module nvidia-fs is not loaded: libcufile would copy through host memory (its compatibility mode)"
	default:
		r.Real = true
		r.Why = "libcufile and the kernel module nvidia-fs are there; which file systems take part is for gdscheck to say"
	}
	return r
}
