package binding

import (
	"runtime"
	"runtime/debug"
	"testing"
	"time"
)

// The first collection restores the usual percentage and allocates the ballast.
func TestFirstCollectionAllocatesBallast(t *testing.T) {
	before := debug.SetGCPercent(usualPercent)
	defer debug.SetGCPercent(before)
	putOffCollections()
	for range 200 {
		runtime.GC()
		time.Sleep(5 * time.Millisecond) // cleanups run concurrently
		percent := debug.SetGCPercent(usualPercent)
		if percent == usualPercent && ballast.Load() != nil {
			return
		}
		debug.SetGCPercent(percent)
	}
	t.Fatal("the first collections did not restore the percentage or allocate the ballast")
}
