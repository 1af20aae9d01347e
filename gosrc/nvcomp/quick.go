package nvcomp

// Predicts whether a batch finishes quickly.

// quickBytes is the maximum content of a quick Run. The slowest decoder takes some tens of milliseconds for it.
const quickBytes = 32 << 20

// Quick reports whether Run finishes so quickly, mostly without goroutines, that it need not be interruptible. This
// is the case if the input and everything that it can decode to are small.
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

// mostBytes returns the maximum number of bytes that decoding or measuring src can process.
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
		return 0 // Run returns an error
	}
	return min(limit, int64(len(src))*a.mostRatio())
}

// mostRatio returns an upper bound of the number of bytes that one byte of a block decodes to.
func (a *algorithm) mostRatio() int64 {
	switch a.id {
	case Zstd:
		return 128 << 10 / 4 // a block that repeats one byte
	case X16:
		return 1 << 20
	}
	n, _ := a.most(make([]byte, 1))
	return n
}
