package codectest

import "unsafe"

// beyond adds 1 to byte i of p, even if i is outside the bounds of p.
func beyond(p []byte, i int) { *(*byte)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(p)), i))++ }
