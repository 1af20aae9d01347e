//go:build !asan && !race

package x16

import "testing"

// An Encoder that has been used, and a decoder, allocate nothing.
func TestAllocations(t *testing.T) {
	src := benchSample(BF16, 1<<16)
	var e Encoder
	buf, st, _ := e.Encode(nil, src, BF16)
	dst := make([]byte, len(src))
	if n := testing.AllocsPerRun(20, func() { buf, _, _ = e.Encode(buf[:0], src, BF16) }); n != 0 {
		t.Errorf("Encode allocates %v times", n)
	}
	n := testing.AllocsPerRun(20, func() {
		if err := Decode(dst, buf, BF16, st); err != nil {
			t.Fatal(err)
		}
	})
	if n != 0 {
		t.Errorf("Decode allocates %v times", n)
	}
}
