package save

// This file sets the number of workers.

import (
	"runtime"

	"github.com/overwire/overwire/gosrc/knob"
)

// Threads is the number of workers: asked, or if that is 0 the setting, or one per
// core.
func Threads(asked int) int {
	if asked <= 0 {
		asked = knob.Threads.Get()
	}
	if asked <= 0 {
		asked = runtime.GOMAXPROCS(0)
	}
	return min(asked, 256)
}
