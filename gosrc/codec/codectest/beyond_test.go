package codectest

import "unsafe"

// beyond increments byte i of p, even if i is out of bounds.
func beyond(p []byte, i int) { *(*byte)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(p)), i))++ }
