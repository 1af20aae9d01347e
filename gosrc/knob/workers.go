package knob

// This file determines the number of workers.

import "runtime"

// Workers returns the number of workers: asked if that is positive, otherwise the setting, otherwise one per
// CPU. It is at most 256.
func Workers(asked int) int {
	if asked <= 0 {
		asked = Threads.Get()
	}
	if asked <= 0 {
		asked = runtime.GOMAXPROCS(0)
	}
	return min(asked, 256)
}
