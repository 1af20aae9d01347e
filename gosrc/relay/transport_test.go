package relay

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/peers"
	"github.com/overwire/overwire/gosrc/plan"
)

// Group loads without tensors also join each other, in any order: the first one stays until the last has joined. The
// ranks map each other's memory in rank order.
func TestGroupLoadsWithoutTensors(t *testing.T) {
	m := plain(t, []int64{7})
	const ranks = 3
	relays, offers := make([]*Relay, ranks), make([]peers.Offer, ranks)
	for rank := range relays {
		r, err := Start(m, &Spec{Size: ranks * 4096, Ranks: ranks, Rank: rank, Mapped: true, Buffers: 2})
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Aim(nil); err != nil {
			t.Fatal(err)
		}
		if offers[rank], err = r.Offer(); err != nil {
			t.Fatal(err)
		}
		relays[rank] = r
	}
	for _, rank := range []int{1, 0, 2} {
		time.Sleep(50 * time.Millisecond)
		if rank != 2 && relays[1].lay.transport.Memory(2) != nil {
			t.Error("rank 1 mapped memory before rank 0")
		}
		if err := relays[rank].Join(offers); err != nil {
			t.Error(err)
		}
	}
	for rank, r := range relays {
		if _, err := r.Job().Wait(-1); err != nil {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
	if left := spawntest.Left(); len(left) != 0 {
		t.Errorf("still running: %v", left)
	}
}

// A heldWriter writes the start of a response, and the rest after `open` is closed.
type heldWriter struct {
	http.ResponseWriter
	open chan struct{}
	n    *atomic.Int64
}

func (w heldWriter) Write(p []byte) (int, error) {
	if w.n.Add(int64(len(p))) > 256<<10 {
		<-w.open
	}
	return w.ResponseWriter.Write(p)
}

// openHeld opens a file over HTTP. Until release is called, no response sends more than 256 KiB.
func openHeld(t *testing.T, path string) (m *load.Model, release func()) {
	t.Helper()
	open := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		http.ServeFile(heldWriter{w, open, new(atomic.Int64)}, q, path)
	}))
	t.Cleanup(server.Close)
	m, err := load.Open(t.Context(), load.Spec{URIs: []string{server.URL + "/m.safetensors"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m, func() { close(open) }
}

// A slow reader delays only its own reads. Before it has read anything, all ranks get everything that the others
// read, even if that needs more pieces than there are buffers.
func TestLateReader(t *testing.T) {
	const ranks, late, mib = 3, 1, 1 << 20
	m := plain(t, []int64{12, mib}, []int64{9 * mib})
	far, release := openHeld(t, m.Index().Sources[0].URI)
	relays, offers, got := make([]*Relay, ranks), make([]peers.Offer, ranks), make([][]byte, ranks)
	for rank := range relays {
		from := m
		if rank == late {
			from = far
		}
		r, err := Start(from, &Spec{Tensors: []int64{0, 1}, Size: ranks * (mib + 4096), Ranks: ranks, Rank: rank,
			Mapped: true, Buffers: 2})
		if err != nil {
			t.Fatal(err)
		}
		if offers[rank], err = r.Offer(); err != nil {
			t.Fatal(err)
		}
		relays[rank], got[rank] = r, bytes.Repeat([]byte{1}, 21*mib)
		err = r.Aim([]plan.Request{{Tensor: 0, Dest: uintptr(unsafe.Pointer(&got[rank][0])), Hi0: plan.Whole,
			Hi1: plan.Whole},
			{Tensor: 1, Dest: uintptr(unsafe.Pointer(&got[rank][12*mib])), Hi0: plan.Whole, Hi1: plan.Whole}})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, r := range relays {
		if err := r.Join(offers); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(relays[0].lay.pieces); n < 6 {
		t.Fatalf("%d pieces", n)
	}
	for _, r := range relays {
		var done []int
		for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			r.prog.mu.Lock()
			done = slices.Clone(r.prog.decoded)
			r.prog.mu.Unlock()
			if done[0] == len(r.lay.pieces) && done[2] == len(r.lay.pieces) {
				break
			}
		}
		if done[0] < len(r.lay.pieces) || done[2] < len(r.lay.pieces) {
			t.Errorf("rank %d has %v of %d pieces", r.lay.spec.Rank, done, len(r.lay.pieces))
		}
		if done[late] > 1 { // the response with the header may include the first piece
			t.Errorf("rank %d decoded pieces that were not read", r.lay.spec.Rank)
		}
	}
	release()
	for rank, r := range relays {
		if _, err := r.Job().Wait(-1); err != nil || bytes.ContainsRune(got[rank], 1) {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
	if left := spawntest.Left(); len(left) != 0 {
		t.Errorf("still running: %v", left)
	}
}
