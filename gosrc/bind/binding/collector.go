package binding

// This file schedules the garbage collector: it does not run while the engine starts, and rarely while the heap is
// small.

import (
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
)

// By default, Go collects when the heap has doubled or grown by 4 MiB. This happened two or three times while a group
// load was planned, and took half of that time.
const (
	usualPercent = 100
	firstPercent = 4 * usualPercent // the first collection is at 16 MiB
	ballastBytes = 8 << 20
)

// ballast counts as heap for the collector. It is never touched, so it takes no host memory.
var ballast atomic.Pointer[[ballastBytes]byte]

// putOffCollections is called once, at the start. Allocating the ballast so early would trigger a collection, so it
// sets a high percentage instead. The first collection allocates the ballast and restores the usual percentage, which a
// large heap needs. If the process sets GOGC, nothing is changed.
var putOffCollections = sync.OnceFunc(func() {
	if usual := debug.SetGCPercent(firstPercent); usual != usualPercent {
		debug.SetGCPercent(usual)
		return
	}
	garbage := new([64]byte) // the first collection frees it
	runtime.AddCleanup(garbage, func(percent int) {
		ballast.Store(new([ballastBytes]byte))
		debug.SetGCPercent(percent)
	}, usualPercent)
})
