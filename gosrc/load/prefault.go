package load

// This file faults in the pages of mapped tensors before they are accessed.

import (
	"runtime"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/internal/idle"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

const populateStep = 32 << 20 // bytes that one call populates

// prefaultPages populates the pages of mapped tensors in the background; the job does not wait for it. One call
// populates neighbours in the same mapping. It uses only cores that the process leaves idle, because a caller that
// immediately reads on all cores is faster without it. It holds a mapping until its pages are populated, the caller
// has released the mapping, or no core was free for a second.
func prefaultPages(mem []device.Memory, maps []int) {
	runs := make([]device.Memory, 0, len(maps))
	for _, i := range maps {
		m := mem[i]
		if k := len(runs) - 1; k >= 0 && runs[k].Block == m.Block {
			r := &runs[k]
			at := int64(uintptr(m.Ptr)) - int64(uintptr(r.Ptr))
			if at >= 0 && at <= r.Bytes+populateStep && at+m.Bytes <= populateStep {
				r.Bytes = max(r.Bytes, at+m.Bytes)
				continue
			}
		} else {
			m.Block.Hold() // once for consecutive runs of one block
		}
		runs = append(runs, m)
	}
	spawn.Go("prefault", func() {
		runtime.LockOSThread() // for idle.Cores
		defer runtime.UnlockOSThread()
		cores := idle.New()
		for i, r := range runs {
			for at := int64(0); at < r.Bytes; at += populateStep {
				// The disk reads the next step while this step is populated.
				switch next := at + populateStep; {
				case next < r.Bytes:
					cpu.Announce(unsafe.Add(r.Ptr, next), min(populateStep, r.Bytes-next))
				case i+1 < len(runs):
					cpu.Announce(runs[i+1].Ptr, min(populateStep, runs[i+1].Bytes))
				}
				if !cores.Wait(r.Block.Alone) {
					break
				}
				// An error here occurs again when the page is accessed.
				_ = cpu.Populate(unsafe.Add(r.Ptr, at), min(populateStep, r.Bytes-at))
			}
			if i+1 == len(runs) || runs[i+1].Block != r.Block {
				device.Memory{Block: r.Block}.Release() // undoes the Hold above
			}
		}
	})
}
