package x16

// Checks and expands the probability table of a chunk.

import "github.com/overwire/overwire/gosrc/errs"

// A table is the stored probability model of a chunk. It determines the symbols of the 16 buckets of 16 slots
// (docs/format.md 3.4).
type table struct {
	freq    [16]uint8
	divider [16]uint8 // positions of bucket b below this belong to symbol b
	alias   [16]uint8 // the other positions belong to this symbol
}

// A slot is the symbol and rank for one value of the low 8 bits of a state.
type slot struct{ symbol, rank uint8 }

// checkParts checks that the three parts agree: every symbol has exactly freq slots, and a bucket that belongs
// completely to its own symbol has only one encoding. The table must not be used before this check.
func (t *table) checkParts() error {
	sum := 0
	var slots [16]int
	for b := range 16 {
		d, a := int(t.divider[b]), t.alias[b]
		if d > 16 || a > 15 || (d == 16) != (int(a) == b) {
			return errs.New(errs.ErrCorrupt, "invalid bucket %d: divider %d, alias %d", b, d, a)
		}
		sum += int(t.freq[b])
		slots[b] += d
		slots[a] += 16 - d
	}
	if sum != 256 {
		return errs.New(errs.ErrCorrupt, "the frequencies sum to %d, expected 256", sum)
	}
	for k, n := range slots {
		if n != int(t.freq[k]) {
			return errs.New(errs.ErrCorrupt, "symbol %d has frequency %d but %d slots", k, t.freq[k], n)
		}
	}
	return nil
}

// aliasBias returns, for each bucket, the rank of its alias at position 0. It is negative if position 0 does not
// belong to the alias. The table must have passed checkParts.
func (t *table) aliasBias() (out [16]int) {
	next := [16]int{}
	for k, d := range t.divider {
		next[k] = int(d)
	}
	for b := range 16 {
		d, a := int(t.divider[b]), t.alias[b]
		out[b] = next[a] - d
		if d < 16 {
			next[a] += 16 - d
		}
	}
	return
}

// expandSlots expands a checked table.
func (t *table) expandSlots() (out [256]slot) {
	bias := t.aliasBias()
	for s := range out {
		b, r := s/16, s%16
		if r < int(t.divider[b]) {
			out[s] = slot{uint8(b), uint8(r)}
		} else {
			out[s] = slot{t.alias[b], uint8(r + bias[b])}
		}
	}
	return
}

// newTable arranges frequencies as 16 buckets of two symbols with the method of A. J. Walker and M. Vose. A bucket that
// its own symbol does not fill gets the rest from the lowest-numbered symbol with more slots than its bucket holds.
func newTable(freq [16]uint8) (t table) {
	t.freq = freq
	remaining := [16]int{}
	for k, f := range freq {
		remaining[k] = int(f)
	}
	// Buckets are closed one at a time. The giver is the symbol that fills the rest of the bucket. If a giver has fewer
	// than 16 slots left, its own bucket is closed later. The mean is 16, so every bucket below 16 has a giver.
	var isClosed [16]bool
	for range 16 {
		b := -1
		for k := range remaining {
			if !isClosed[k] && remaining[k] < 16 {
				b = k
				break
			}
		}
		if b < 0 {
			break // all open buckets have exactly 16
		}
		giver := b
		for k := range remaining {
			if !isClosed[k] && remaining[k] > 16 {
				giver = k
				break
			}
		}
		t.divider[b], t.alias[b] = uint8(remaining[b]), uint8(giver)
		remaining[giver] -= 16 - remaining[b]
		isClosed[b] = true
	}
	for b := range remaining {
		if !isClosed[b] {
			t.divider[b], t.alias[b] = 16, uint8(b)
		}
	}
	return
}
