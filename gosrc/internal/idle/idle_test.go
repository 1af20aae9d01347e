package idle

import (
	"runtime"
	"testing"
	"time"
)

// A core counts as unused if no thread of the process except the calling one uses it.
func TestCores(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if process, thread := processorTimes(); process < thread || thread < 0 {
		t.Fatalf("the process has used %v, its thread %v", process, thread)
	}
	never := func() bool { return false }
	s := New()
	for end := time.Now().Add(20 * time.Millisecond); time.Now().Before(end); {
	} // the thread's own work does not count
	if !s.Wait(never) {
		t.Error("found no unused core, although no other thread runs")
	}
	if s.Wait(func() bool { return true }) {
		t.Error("Wait did not stop")
	}
	s.patient = 0
	if s.Wait(never) {
		t.Error("Wait waited longer than a second in total")
	}
	// A core that is not available is never unused.
	s = New()
	s.cores, s.patient = -1, 3*time.Millisecond
	if s.Wait(never) {
		t.Error("found an unused core, but none is available")
	}
	// CPU time used by other threads since the last sample counts.
	s = New()
	s.at = s.at.Add(-10 * time.Millisecond)
	s.others -= time.Hour
	if s.sampleUse() {
		t.Error("an hour of CPU time of other threads within 10 ms was ignored")
	}
}
