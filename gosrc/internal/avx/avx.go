// Package avx clears the vector registers for code that does not use AVX.
//
// Once AVX or AVX-512 has written the upper half of a register, every SSE instruction of
// the thread can take hundreds of cycles until the upper halves are cleared. This
// affects SHA-NI, Go's floats and copies, and the calling C code. Go's compiler does not
// clear them after simd/archsimd. So code that uses it calls Clear once per call when it
// has finished with vectors, before it copies or returns. No vector may live beyond
// that.
//
// In a binary with GOEXPERIMENT=simd, preempting a goroutine also leaves them dirty, on
// its old and on its new thread. Loops of SSE instructions that must be fast call Clear
// once per block.
package avx
