//go:build !amd64

package sha256

import "unsafe"

const fast = false

func blocks(*[8][Lanes]uint32, *[Lanes]unsafe.Pointer, int) { panic("sha256: not on this processor") }
