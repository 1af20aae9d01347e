package idle

import (
	"runtime"
	"testing"
	"time"
)

// A core counts as unused by what the process does outside the asking thread.
func TestCores(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if process, thread := processorTimes(); process < thread || thread < 0 {
		t.Fatalf("the process has used %v, its thread %v", process, thread)
	}
	never := func() bool { return false }
	s := New()
	for end := time.Now().Add(20 * time.Millisecond); time.Now().Before(end); {
	} // its own work does not count
	if !s.Wait(never) {
		t.Error("no core is unused, though nothing runs")
	}
	if s.Wait(func() bool { return true }) {
		t.Error("waited for what was over")
	}
	s.patient = 0
	if s.Wait(never) {
		t.Error("waited after it had lost patience")
	}
	// A core that no one may use is never unused.
	s = New()
	s.cores, s.patient = -1, 3*time.Millisecond
	if s.Wait(never) {
		t.Error("found a core where there is none")
	}
	// Use by others in the meantime counts.
	s = New()
	s.at = s.at.Add(-10 * time.Millisecond)
	s.others -= time.Hour
	if s.sampleUse() {
		t.Error("an hour of others' work in 10 ms was not seen")
	}
}
