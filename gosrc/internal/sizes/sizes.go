// Package sizes is the arithmetic of sizes and counts that come out of files:
// no sum on its way wraps.
package sizes

import "math/bits"

// An Integer is what sizes and counts are held in.
type Integer interface {
	~int | ~int64 | ~uint32 | ~uint64
}

// CeilDiv is n / d rounded up, for n >= 0 and d > 0.
func CeilDiv[T Integer](n, d T) T {
	q := n / d
	if n%d != 0 {
		q++
	}
	return q
}

// RoundUp is the least multiple of to that is n or more, for n >= 0 and to > 0.
// T holds it for every n that has passed tensor.Size, which leaves 2 bits.
func RoundUp[T Integer](n, to T) T { return CeilDiv(n, to) * to }

// Mul is a times b, and 0 and false where that is more than 64 bits hold.
func Mul(a, b uint64) (uint64, bool) {
	hi, lo := bits.Mul64(a, b)
	if hi != 0 {
		return 0, false
	}
	return lo, true
}
