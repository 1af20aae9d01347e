//go:build cgo && owfake

package cuda

import (
	"bytes"
	"testing"

	"github.com/overwire/overwire/gosrc/codec/cascaded"
)

// Blocks as nvCOMP 6 has them: what the encoder makes comes back, damaged ones
// are accepted and refused as by the Go decoder, and give the same bytes.
func TestTwinCascadedSix(t *testing.T) {
	r := random(t)
	whole, refused, accepted := 0, 0, 0
	for range 1200 {
		o := cascaded.Options{Type: cascaded.Type(r.IntN(8)), RLEs: r.IntN(5), Deltas: r.IntN(4)}
		var plain []byte
		for _, v := range integers(r, r.IntN(3)*r.IntN(1500)) {
			plain = appendElement(plain, o.Type.Size(), v)
		}
		stored, err := cascaded.Encode6(nil, plain, o)
		if err != nil {
			t.Fatal(err)
		}
		damaged := r.IntN(2) == 0
		if damaged {
			for range 1 + r.IntN(3) {
				i := r.IntN(len(stored))
				if r.IntN(2) == 0 {
					i = r.IntN(min(len(stored), 60))
				}
				stored[i] ^= 1 << r.IntN(8)
			}
			if r.IntN(4) == 0 {
				stored = stored[:r.IntN(len(stored)+1)]
			}
		}
		room := len(plain) + r.IntN(2)*r.IntN(30)
		size, err := cascaded.Size(stored)
		var want []byte
		if err == nil && size <= int64(room) {
			want = make([]byte, size)
			err = cascaded.Decode(want, stored)
		}
		ok := err == nil && size <= int64(room)
		got, status := twinOne(t, "cascaded", stored, room, 0)
		if ok != (status == 0) || ok && !bytes.Equal(got, want) {
			t.Fatalf("%+v: status %d, Go: %v, of %x with room for %d", o, status, err, stored, room)
		}
		switch {
		case !damaged && (!ok || !bytes.Equal(want, plain)):
			t.Fatalf("%+v: %d bytes: %v", o, len(plain), err)
		case !damaged:
			whole++
		case ok:
			accepted++
		default:
			refused++
		}
	}
	t.Logf("%d whole, %d refused, %d still valid", whole, refused, accepted)
	if refused < 100 || accepted < 100 {
		t.Error("too one-sided to say anything")
	}
}
