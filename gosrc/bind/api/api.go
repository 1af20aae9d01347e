package api

// This file defines the functions that gopy binds.

import (
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/bind/binding"
)

// Setup applies the environment that Python passes as a JSON object.
func Setup(env string) (uint64, error) {
	return binding.Guard("setup", func() (uint64, error) { return given(binding.Setup(env)) })
}

// Call runs a verb that does not wait, on the caller's thread. numbers is the
// address of n numbers in the caller's memory.
func Call(verb, request string, numbers uint64, n int) (uint64, error) {
	return binding.Guard(verb, func() (uint64, error) {
		return given(binding.Call(verb, request, numbersAt(numbers, n)))
	})
}

// Start starts a verb that waits, and returns its job.
func Start(verb, request string, numbers uint64, n int) (uint64, error) {
	return binding.Guard(verb, func() (uint64, error) { return binding.Start(verb, request, numbersAt(numbers, n)) })
}

// Wait waits up to ns nanoseconds for the end of a job, and returns its error.
func Wait(job uint64, ns int) (bool, error) {
	return binding.Guard("wait", func() (bool, error) { return binding.Wait(job, time.Duration(ns)) })
}

// Take returns the result of a job, or 0 if there is none after ns nanoseconds. See binding.Take for how.
func Take(job uint64, ns, how int) (uint64, error) {
	return binding.Guard("take", func() (uint64, error) { return given(binding.Take(job, time.Duration(ns), how)) })
}

// Free frees a handle. See binding.Free for how.
func Free(handle uint64, how int) (int, error) {
	return binding.Guard("free", func() (int, error) { binding.Free(handle, how); return 1, nil })
}

// numbersAt returns the caller's memory as a slice.
func numbersAt(address uint64, n int) []int64 {
	at := uintptr(address)
	return unsafe.Slice(*(**int64)(unsafe.Pointer(&at)), n)
}
