//go:build !(goexperiment.simd && amd64) || scalar

package x16

// Without GOEXPERIMENT=simd, or on other processors, the scalar encoder is used.

type fastCoder struct{}

func splitFast(Level, uint8, []byte, []byte, *[maxPlanes][]byte) bool { return false }

func (e *Encoder) prepareFast(*model) {}

func (e *Encoder) symbolsFast(*model) int { return 0 }

func (e *Encoder) groupFast([][]byte) bool { return false }
