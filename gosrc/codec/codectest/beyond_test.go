package codectest

import "unsafe"

// beyond writes to byte i of p, also outside its bounds.
func beyond(p []byte, i int) { *(*byte)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(p)), i))++ }
