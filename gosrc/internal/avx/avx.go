// Package avx leaves the vector registers as code without AVX wants them.
//
// Once AVX or AVX-512 has written the upper half of a register, every SSE instruction
// that the thread runs afterwards takes up to hundreds of cycles, until the upper halves
// are cleared: SHA-NI, the floats and copies of Go, and the C code that called. Go's
// compiler does not clear them after simd/archsimd, so that everything that uses it
// calls Clear when it has done with vectors, once a call, before it copies or returns:
// no vector lives beyond.
//
// In a binary with GOEXPERIMENT=simd the preemption of a goroutine also leaves them
// dirty, on the thread where it was and where it goes on. Loops of SSE that are to be
// fast call Clear once a block.
package avx
