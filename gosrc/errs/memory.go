package errs

// This file defines the error of a failed allocation.

import "fmt"

// A Memory is an ErrMemory with the sizes of the allocation, of the free memory and of the total memory, in
// bytes; -1 means unknown.
type Memory struct {
	Where              string // "cuda:0", "host"
	Asked, Free, Total int64
	For                string // purpose, such as "3 tensors"
	Err                string // text from the system or the driver
}

// Error returns text like: out of memory: cuda:0: 4096 bytes for 3 tensors: 100 of 9000 are free (cuMemAlloc_v2: ...)
func (m *Memory) Error() string {
	s := ErrMemory.Error() + ": " + m.Where
	if m.Asked >= 0 {
		s += fmt.Sprintf(": %d bytes", m.Asked)
	}
	if m.For != "" {
		s += " for " + m.For
	}
	if m.Total >= 0 {
		s += fmt.Sprintf(": %d of %d are free", m.Free, m.Total)
	}
	if m.Err != "" {
		s += " (" + m.Err + ")"
	}
	return s
}

// Unwrap returns the class.
func (m *Memory) Unwrap() error { return ErrMemory }
