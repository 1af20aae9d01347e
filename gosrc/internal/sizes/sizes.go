// Package sizes computes with sizes and counts from files without overflow.
package sizes

import "math/bits"

// An Integer is a type of sizes and counts.
type Integer interface {
	~int | ~int64 | ~uint32 | ~uint64
}

// CeilDiv returns n / d rounded up, for n >= 0 and d > 0.
func CeilDiv[T Integer](n, d T) T {
	q := n / d
	if n%d != 0 {
		q++
	}
	return q
}

// RoundUp returns the smallest multiple of `to` that is at least n, for n >= 0 and to > 0. The result fits in T for
// every n from tensor.Size, which leaves 2 bits free.
func RoundUp[T Integer](n, to T) T { return CeilDiv(n, to) * to }

// Mul returns a times b, or 0 and false if that exceeds 64 bits.
func Mul(a, b uint64) (uint64, bool) {
	hi, lo := bits.Mul64(a, b)
	if hi != 0 {
		return 0, false
	}
	return lo, true
}
