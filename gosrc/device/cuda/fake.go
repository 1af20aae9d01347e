//go:build cgo && owfake

package cuda

/*
#include "fake.h"
*/
import "C"

import (
	"fmt"
	"strings"

	"github.com/overwire/overwire/gosrc/device"
	_ "github.com/overwire/overwire/gosrc/device/cuda/cudatest" // the driver
)

// What tests need of the fake driver, since test files cannot use cgo.

// Fake replaces the driver by the fake one, with `memory` bytes, for tests of other
// packages; queues are small. end closes its devices and reports what was leaked or
// which rule of the driver was broken; "" means none.
func Fake(memory int64) (end func() string) {
	useFake(memory)
	usual, first, pack, whole := ring, firstRing, packSlot, seam
	ring.slots, ring.bytes, firstRing, packSlot, seam = 6, 256<<10, 8<<20, 128<<10, 64<<10
	return func() string {
		defer func() { ring, firstRing, packSlot, seam = usual, first, pack, whole }()
		FakeFail(0, 0, false)
		driver.mu.Lock()
		var open []*Device
		for _, d := range driver.devices {
			open = append(open, d)
		}
		driver.mu.Unlock()
		text := ""
		for _, d := range open {
			if err := d.close(); err != nil {
				text += err.Error() + "; "
			}
		}
		if s := fakeGet(); s.broken > 0 || s.blocks+s.bytes+s.pins+s.streams+s.events+s.modules+s.contexts+s.pending+s.relaxed+s.attached != 0 {
			text += fmt.Sprintf("%+v", s)
		}
		return text
	}
}

// FakeFail makes the nth call of the driver from now fail with a code; with
// sticky, all later ones too. 0: none.
func FakeFail(nth int64, code int, sticky bool) {
	C.owcu_fake_fail(C.int64_t(nth), C.int(code), cBool(sticky))
}

// FakeHost gives the host other tables of nodes and devices, until restore is called;
// cuda:N is at ffff:0N:00.0.
func FakeHost(root string) (restore func()) {
	had := system
	system = root
	return func() { system = had }
}

// FakeHistory is the names of the first calls of the driver, some thousands, since it was
// asked before: "mem_alloc".
func FakeHistory() []string {
	text := make([]C.char, 64<<10)
	C.owcu_fake_history(&text[0], C.size_t(len(text)), 1)
	return strings.Fields(strings.ReplaceAll("\n"+C.GoString(&text[0]), "\nf_", "\n"))
}

// FakeCalls counts the calls since Fake.
func FakeCalls() int64 { return fakeGet().calls }

// FakeInPlace counts the stored bytes that kernels have read in pinned memory since
// Fake. cuda:1 is coherent, cuda:0 is not.
func FakeInPlace() int64 { return fakeGet().inPlace }

// FakeBusy queues work on a stream that does not end before idle is called;
// FakeWaited counts the calls that wait for it meanwhile.
func FakeBusy(stream uintptr) (idle func()) {
	C.owcu_fake_busy(C.uint64_t(stream))
	return func() { C.owcu_fake_idle() }
}

// FakeWaited counts, since Fake, the calls that waited, or may have waited, for
// such work.
func FakeWaited() int64 { return fakeGet().waited }

// FakeCapture begins a capture of a graph in the global mode on a stream, or on one
// of another library (0); calls that would destroy it break a rule. blocking: the
// default stream waits for that stream.
func FakeCapture(stream uintptr, blocking bool) (end func()) {
	C.owcu_fake_capture(C.uint64_t(stream), cBool(blocking), 1)
	return func() { C.owcu_fake_capture(C.uint64_t(stream), cBool(blocking), 0) }
}

type fakeState struct {
	calls, blocks, bytes, pins, streams, events, modules, contexts, broken, pending, relaxed, waited, attached, inPlace int64
	what                                                                                                                string
}

// useFake replaces the driver by the fake one, with `memory` bytes.
func useFake(memory int64) {
	driver.mu.Lock()
	defer driver.mu.Unlock()
	C.owcu_fake_reset(C.uint64_t(memory))
	C.owcu_fake_version(13000, 2)
	C.owcu_use(C.owcu_fake_api())
	driver.ready, driver.devices = false, nil
}

// fakeLose loses the device: every call fails with code.
func fakeLose(code int) { C.owcu_fake_fail(1, C.int(code), 2) }

func fakeVersion(version, devices int) {
	driver.mu.Lock()
	defer driver.mu.Unlock()
	driver.ready = false
	C.owcu_fake_version(C.int(version), C.int(devices))
}

func fakeGet() fakeState {
	var s C.struct_owcu_fake_state
	C.owcu_fake_get(&s)
	return fakeState{
		int64(s.calls), int64(s.blocks), int64(s.bytes), int64(s.pins), int64(s.streams), int64(s.events),
		int64(s.modules), int64(s.contexts), int64(s.broken), int64(s.pending), int64(s.relaxed), int64(s.waited), int64(s.attached), int64(s.in_place), C.GoString(&s.what[0]),
	}
}

// fakeFork reports whether a forked child is refused without a call.
func fakeFork(d *Device) bool { return C.owcu_fake_fork(C.owcu_handle(d.ctx)) == 0 }

// fakeFill queues a fill of m on a stream of another user.
func fakeFill(m device.Memory, v byte, stream uintptr) {
	C.owcu_fake_fill(deviceAddress(m.Ptr), C.int(v), C.uint64_t(m.Bytes), C.uint64_t(stream))
}

// fakes: this build has the fake driver.
const fakes = true
