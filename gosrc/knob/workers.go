package knob

// This file determines the number of workers.

import "runtime"

// Workers returns the number of workers: asked, or if that is 0 the setting, or else one per CPU.
func Workers(asked int) int {
	if asked <= 0 {
		asked = Threads.Get()
	}
	if asked <= 0 {
		asked = runtime.GOMAXPROCS(0)
	}
	return min(asked, 256)
}
