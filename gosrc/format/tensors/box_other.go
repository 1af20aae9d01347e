//go:build !amd64

package tensors

const wide = false

func salsa16(*byte, int, *[16]uint32) { panic("no such instructions") }

func poly8(*[3][8]uint64, *[5]uint64, *byte, int) { panic("no such instructions") }
