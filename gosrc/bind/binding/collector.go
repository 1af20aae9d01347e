package binding

// This file says when the garbage collector runs: not while the engine starts, and seldom
// while its heap is small.

import (
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
)

// Go begins a collection when the heap has grown by its own size, or by 4 MiB. It did so two
// or three times while a group's load was planned, and took half of the time.
const (
	usualPercent = 100
	firstPercent = 4 * usualPercent // the first collection comes at 16 MiB
	ballastBytes = 8 << 20
)

// ballast is never used: memory that no one touches takes none of the host's, and counts
// for the collector, which waits until the heap has grown by as much.
var ballast atomic.Pointer[[ballastBytes]byte]

// putOffCollections is called once, at the start. Ballast at the start would be collected
// at the start: until the first collection a percentage stands for it, which a large heap
// must not keep. A process that sets GOGC has said what it wants.
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
