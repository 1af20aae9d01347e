package binding

// This file says when the garbage collector runs: not while the engine starts, and seldom
// while its heap is small.

import (
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
)

// Go begins a collection when the heap has grown by its own size, or by 4 MiB: two or three
// times while a group's load was planned, which took half of the time.
const (
	usualPercent = 100
	firstPercent = 4 * usualPercent // the first collection comes at 16 MiB
	ballastBytes = 8 << 20
)

// ballast is never used, so it takes no memory of the host, and the collector counts it.
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
