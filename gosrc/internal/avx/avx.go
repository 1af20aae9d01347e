// Package avx clears the vector registers for code that does not use AVX.
//
// After AVX or AVX-512 has written the upper half of a register, every SSE instruction of the thread can take
// hundreds of cycles until the upper halves are cleared. This affects SHA-NI, Go's floating-point code and
// copies, and the calling C code. Go's compiler does not clear the upper halves after simd/archsimd calls. Code
// with such calls therefore calls Clear once per call, after its last vector operation and before it copies or
// returns. No vector may be used afterwards.
//
// In a binary with GOEXPERIMENT=simd, preempting a goroutine also leaves the upper halves dirty, on the
// goroutine's old and new threads. Loops of SSE instructions that must be fast call Clear once per block.
package avx
