package binding

import (
	"runtime"
	"runtime/debug"
	"testing"
	"time"
)

// The first collection ends the percentage of the start, and puts ballast in the heap.
func TestFirstCollectionBringsBallast(t *testing.T) {
	before := debug.SetGCPercent(usualPercent)
	defer debug.SetGCPercent(before)
	putOffCollections()
	for range 200 {
		runtime.GC()
		time.Sleep(5 * time.Millisecond) // cleanups run beside the program
		percent := debug.SetGCPercent(usualPercent)
		if percent == usualPercent && ballast.Load() != nil {
			return
		}
		debug.SetGCPercent(percent)
	}
	t.Fatal("the first collections left another percentage, or no ballast")
}
