//go:build cgo

package api

import (
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/bind/binding"
)

// Setup takes the environment as Python sees it, a JSON object.
func Setup(env string) (uint64, error) {
	return binding.Guard("setup", func() (uint64, error) { return given(binding.Setup(env)) })
}

// Call answers a verb that does not wait, on the caller's thread. numbers is the
// address of n numbers, which are the caller's.
func Call(verb, request string, numbers uint64, n int) (uint64, error) {
	return binding.Guard(verb, func() (uint64, error) { return given(binding.Call(verb, request, numbersAt(numbers, n))) })
}

// Start begins a verb that waits, and returns its job.
func Start(verb, request string, numbers uint64, n int) (uint64, error) {
	return binding.Guard(verb, func() (uint64, error) { return binding.Start(verb, request, numbersAt(numbers, n)) })
}

// Wait waits for the end of a job, ns nanoseconds at most, and returns its error.
func Wait(job uint64, ns int) (bool, error) {
	return binding.Guard("wait", func() (bool, error) { return binding.Wait(job, time.Duration(ns)) })
}

// Take returns what a job gives, and 0 if there is nothing after ns nanoseconds;
// how is as binding.Take has it.
func Take(job uint64, ns, how int) (uint64, error) {
	return binding.Guard("take", func() (uint64, error) { return given(binding.Take(job, time.Duration(ns), how)) })
}

// Free forgets what a handle is of; how is as binding.Free has it.
func Free(handle uint64, how int) (int, error) {
	return binding.Guard("free", func() (int, error) { binding.Free(handle, how); return 1, nil })
}

// numbersAt is the caller's memory.
func numbersAt(address uint64, n int) []int64 {
	at := uintptr(address)
	return unsafe.Slice(*(**int64)(unsafe.Pointer(&at)), n)
}
