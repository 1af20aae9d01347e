//go:build !goexperiment.simd || !amd64 || scalar

package digest

// Without AVX-512, the scalar twin sums all words.

func sumFast(*State, uint64, []byte) int { return 0 }
