//go:build !(goexperiment.simd && amd64)

package tensors

// xorBlocks leaves all of it to x/crypto.
func xorBlocks([]byte, *[16]byte, *[32]byte) int { return 0 }
