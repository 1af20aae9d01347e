package nvcomp

// Predicts which batches finish quickly.

// quickBytes is the most content of a quick Run, which takes the slowest decoder some tens of milliseconds.
const quickBytes = 32 << 20

// Quick reports whether Run finishes so soon, mostly without goroutines, that it need not be interruptible: the
// input and everything that it can decode to are small.
func Quick(s *Spec, in []Buffer) bool {
	n := contentBytes(in)
	if n > alone || s.Op == OpEncode || s.Op == OpBound {
		return n <= alone
	}
	var most int64
	for i := range in {
		most += mostBytes(s, in[i].Src)
	}
	return most <= quickBytes
}

// mostBytes is the most bytes that decoding or measuring src can process.
func mostBytes(s *Spec, src []byte) int64 {
	limit := int64(1) << 40
	a, _ := byName(s.Algorithm)
	switch {
	case s.Kind == Native:
		h, err := parseHeader(src)
		if err != nil {
			return 0
		}
		a, _ = byID(h.format)
		limit = int64(min(h.size, 1<<40))
	case s.Kind == WithSize && a != nil && len(src) >= a.prefixBytes():
		limit = int64(min(readPrefix(src[:a.prefixBytes()]), 1<<40))
	}
	if a == nil {
		return 0 // an error
	}
	return min(limit, int64(len(src))*a.mostRatio())
}

// mostRatio is an upper bound of how many bytes one byte of a block decodes to.
func (a *algorithm) mostRatio() int64 {
	switch a.id {
	case Zstd:
		return 128 << 10 / 4 // a block of one byte, repeated
	case X16:
		return 1 << 20
	}
	n, _ := a.most(make([]byte, 1))
	return n
}
