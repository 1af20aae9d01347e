//go:build owfake

package cuda

import (
	"fmt"

	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
)

// Fake replaces the driver with the fake one of package cudatest, whose devices have the given number of bytes, for
// tests of other packages. Queues are small. end closes the devices and describes what leaked or which rule of the
// driver was broken. It returns "" if nothing leaked and no rule was broken.
func Fake(bytes int64) (end func() string) {
	useFake(bytes)
	first := firstRing
	firstRing = 8 << 20
	ends := []func(){func() { firstRing = first }, queue.FakeRing(6, 6, 256<<10), stream.FakePackSlot(128 << 10),
		memory.FakeRegisterAlignment(64 << 10)}
	return func() string {
		defer func() {
			for _, end := range ends {
				end()
			}
		}()
		cudatest.FailCall(0, 0, false)
		opened.mu.Lock()
		var open []*Device
		for _, d := range opened.devices {
			open = append(open, d)
		}
		opened.mu.Unlock()
		text := ""
		for _, d := range open {
			if err := closeDevice(d); err != nil {
				text += err.Error() + "; "
			}
		}
		if s := cudatest.ReadState(); s.Broken > 0 || s.HasLeaks() {
			text += fmt.Sprintf("%+v", s)
		}
		return text
	}
}

// closeDevice closes a device that has no live memory.
func closeDevice(d *Device) error {
	err := d.Trim()
	if e := d.Memory.Close(); err == nil {
		err = e
	}
	d.Streams.Close()
	for _, m := range d.modules {
		m.Close()
	}
	opened.mu.Lock()
	defer opened.mu.Unlock()
	delete(opened.devices, d.Index())
	if e := d.Context.Close(); err == nil {
		err = e
	}
	return err
}

// useFake replaces the driver with the fake one, whose devices have the given number of bytes, and forgets all opened
// devices.
func useFake(bytes int64) {
	opened.mu.Lock()
	defer opened.mu.Unlock()
	driver.UseFake(bytes, 13000, 2)
	opened.devices = nil
}

// fakes reports whether this build has the fake driver.
const fakes = true
