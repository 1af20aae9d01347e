package errs

// The error of an allocation that failed.

import "fmt"

// A Memory is an ErrMemory with its sizes in bytes, each -1 where it is not
// known: the size of the allocation, the free memory and all memory.
type Memory struct {
	Where              string // "cuda:0", "host"
	Asked, Free, Total int64
	For                string // the purpose: "3 tensors"
	Err                string // the text of the system or the driver
}

// Error returns: out of memory: cuda:0: 4096 bytes for 3 tensors: 100 are free of 9000 (cuMemAlloc_v2: ...)
func (m *Memory) Error() string {
	s := ErrMemory.Error() + ": " + m.Where
	if m.Asked >= 0 {
		s += fmt.Sprintf(": %d bytes", m.Asked)
	}
	if m.For != "" {
		s += " for " + m.For
	}
	if m.Total >= 0 {
		s += fmt.Sprintf(": %d are free of %d", m.Free, m.Total)
	}
	if m.Err != "" {
		s += " (" + m.Err + ")"
	}
	return s
}

// Unwrap returns the class.
func (m *Memory) Unwrap() error { return ErrMemory }
