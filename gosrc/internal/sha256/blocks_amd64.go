package sha256

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

var fast = cpu.X86.HasAVX512F && cpu.X86.HasAVX512BW

// blocks hashes n blocks of 64 bytes from each of sixteen places.
//
//go:noescape
func blocks(state *[8][Lanes]uint32, from *[Lanes]unsafe.Pointer, n int)
