package digest_test

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/codectest"
	"github.com/overwire/overwire/gosrc/codec/digest"
)

// A view of any rank, stride and element size has the digest of its contiguous copy.
func TestViews(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	data := make([]byte, 1<<20)
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	defer runtime.KeepAlive(data) // views hold only addresses
	views, want := []digest.View{}, []digest.Sum{}
	for range 400 {
		v, copied := codectest.AnyView(r, data)
		views, want = append(views, v), append(want, digest.Of(copied))
	}
	// This view has more bytes than a worker sums at a time.
	big := digest.View{Address: address(data), Item: 1, Shape: []int64{3000, 3000}, Strides: []int64{0, 1}}
	views, want = append(views, big), append(want, digest.Of(slices.Repeat(data[:3000], 3000)))
	for _, workers := range []int{1, 3} {
		got, err := digest.All(t.Context(), views, workers, nil)
		if err != nil {
			t.Fatal(err)
		}
		for i := range got {
			if got[i] != want[i] {
				t.Errorf("%+v: %v, want %v", views[i], got[i], want[i])
			}
		}
	}
}

func address(p []byte) uint64 { return uint64(uintptr(unsafe.Pointer(&p[0]))) }
