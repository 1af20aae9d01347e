//go:build scalar || !(arm64 || (goexperiment.simd && amd64))

package x16

// Without vector kernels, the scalar decoder is used.

type fastTables struct{}

func (*fastTables) build(Level, *symbols) {}

func detectLevels() []Level { return []Level{Scalar} }

func (d *decoder) decodeFast([]segment) {}

func mergeFast(Level, uint8, []byte, []byte, *[maxPlanes][]byte) bool { return false }
