//go:build owfake

package cuda

import (
	"fmt"

	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
)

// Fake replaces the driver by the fake one of package cudatest, with `memory` bytes, for
// tests of other packages; queues are small. end closes its devices and reports what was
// leaked or which rule of the driver was broken; "" means none.
func Fake(memory int64) (end func() string) {
	useFake(memory)
	usual, first, pack, whole := ring, firstRing, packSlot, registerAlignment
	ring.slots, ring.divided, ring.bytes, firstRing, packSlot, registerAlignment = 6, 6, 256<<10, 8<<20, 128<<10, 64<<10
	return func() string {
		defer func() { ring, firstRing, packSlot, registerAlignment = usual, first, pack, whole }()
		cudatest.FailCall(0, 0, false)
		opened.mu.Lock()
		var open []*Device
		for _, d := range opened.devices {
			open = append(open, d)
		}
		opened.mu.Unlock()
		text := ""
		for _, d := range open {
			if err := d.close(); err != nil {
				text += err.Error() + "; "
			}
		}
		if s := cudatest.ReadState(); s.Broken > 0 || s.HasLeaks() {
			text += fmt.Sprintf("%+v", s)
		}
		return text
	}
}

// FakeMakingQueue makes a device look as if it made a queue, until end.
func FakeMakingQueue(d *Device) (end func()) {
	d.making.Lock()
	return d.making.Unlock
}

// useFake replaces the driver by the fake one, with `memory` bytes, and forgets its devices.
func useFake(memory int64) {
	opened.mu.Lock()
	defer opened.mu.Unlock()
	driver.UseFake(memory, 13000, 2)
	opened.devices = nil
}

// fakes: this build has the fake driver.
const fakes = true
