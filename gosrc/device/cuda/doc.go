// Package cuda is the GPU as a device: stored chunks are copied to it as they are,
// and decoded to their destinations in its memory. It uses only NVIDIA's driver, by the
// table of package driver.
//
// A Device is one GPU's primary context, retained once per process, its flags
// unchanged. A Queue is what one load needs there: pinned slots, staging of the same
// size on the device unless that is coherent, streams. Chunks are validated on the host before a
// kernel sees them, and the kernels are safe for any bytes: a corrupt chunk is an
// error of its task, and the context stays usable.
//
// Everything is safe for concurrent use unless it says otherwise. Nothing works in
// a forked child, as the driver does not.
package cuda

import (
	"fmt"
	"runtime"

	"github.com/overwire/overwire/gosrc/device"
)

// The default geometry of a queue: enough slots that readers, copies and decoders
// all have some, each large enough for the copy engine. With their tables they take
// 70 MiB, pinned and, unless the device is coherent, in staging on it; scratch there
// may take another 16 MiB.
const (
	DefaultSlots     = 8
	DefaultSlotBytes = 8 << 20
)

// dividedSlots is how many of the default slots are divided into those of RemoteRing.
const dividedSlots = 12

// ring is the default geometry; tests on the fake driver make it smaller.
var ring = struct {
	slots, divided int
	bytes          int64
}{DefaultSlots, dividedSlots, DefaultSlotBytes}

// headBytes is the size of a slot's status words and tables. Those of any one chunk
// fit: at most 64 Ki segments of 8 bytes.
const headBytes = 576 << 10

// slotStride is the space of a slot of n bytes.
func slotStride(n int64) int64 { return headBytes + (n+4095)&^4095 }

// huge is the size of the pages that pinned memory lies on.
const huge = 2 << 20

// StagingSize is the memory of a queue with these slots: of the host, pinned, and as much
// of the device unless that is coherent.
func StagingSize(slots int, slotBytes int64) int64 {
	return (int64(slots)*slotStride(slotBytes) + huge - 1) &^ (huge - 1)
}

// DefaultRing is the number of slots of a queue, and their bytes, for loads of no special
// size.
func DefaultRing() (slots int, bytes int64) { return ring.slots, ring.bytes }

// RemoteRing has half more memory, divided into more and smaller slots: for remote sources,
// each of whose connections fills a slot alone.
func RemoteRing() (slots int, bytes int64) { return redivideSlots(ring.divided, ring.bytes/2) }

// ExchangeRing has three slots for each reader, as far as the memory of DefaultRing reaches, of
// which two fit the second-level cache of its core: for ranks that exchange what they read of
// local files; see SubmitAll. With more slots four ranks together have more bytes on their way than
// the processor's caches hold: they read slower, and so do the copies up.
func ExchangeRing(readers int) (slots int, bytes int64) {
	slots, bytes = redivideSlots(ring.slots, ring.bytes/8)
	return min(slots, 3*readers), bytes
}

// roundUpToRing is n, or a bit more where that is the memory of another division.
func roundUpToRing(n int64) int64 {
	one := slotStride(ring.bytes)
	base, whole := int64(ring.slots)*one, int64(ring.divided)*one
	switch {
	case n > base && n < whole:
		return whole
	case n > base/2 && n < base:
		return base
	}
	return n
}

// redivideSlots divides the memory of some of the default slots into slots of these bytes.
func redivideSlots(slots int, bytes int64) (int, int64) {
	return int(int64(slots) * slotStride(ring.bytes) / slotStride(bytes)), bytes
}

// TablesOnly is the slotBytes of a queue whose slots only view device memory: it
// takes next to no pinned memory. The device keeps one such queue beside the other.
const TablesOnly = 4096

// machineCode lists, for each GOARCH, the architectures with machine code in cuda/built,
// in the order of compute capability times ten; PTX for ptx serves the rest.
var machineCode = map[string][]int{"amd64": {80, 90, 100, 120}, "arm64": {90, 100, 121}}

const ptx = 80

// KernelCodeFor names the code that a GPU of a compute capability ("8.7") runs: machine
// code of its own generation that is not newer than itself ("sm_80"), "PTX", which
// the driver compiles at first use, or "" if there is none.
func KernelCodeFor(compute string) string {
	return machineCodeFor(machineCode[runtime.GOARCH], compute)
}

func machineCodeFor(architectures []int, compute string) string {
	major, minor := 0, 0
	if _, err := fmt.Sscanf(compute, "%d.%d", &major, &minor); err != nil {
		return ""
	}
	best := 0
	for _, a := range architectures {
		if a/10 == major && a%10 <= minor {
			best = a
		}
	}
	switch {
	case best > 0:
		return fmt.Sprintf("sm_%d", best)
	case 10*major+minor >= ptx:
		return "PTX"
	}
	return ""
}

// A FilledSlot is a filled slot: what Submit takes.
type FilledSlot struct {
	Slot  *Slot
	N     int64
	Tasks []device.DecodeTask
	Done  func(task int, err error)
}
