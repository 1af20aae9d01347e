package relay_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/load/loadtest"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/relay"
	"github.com/overwire/overwire/gosrc/save"
)

// memory is memory on a device or on the host.
type memory struct {
	at   []uint64
	read func(i int) []byte
	free func()
}

func memoryOn(t *testing.T, where string, sizes []int64) memory {
	t.Helper()
	if where == "cpu" {
		var keep [][]byte
		var pin runtime.Pinner
		m := memory{free: pin.Unpin}
		for _, n := range sizes {
			b := make([]byte, n+64)
			pin.Pin(&b[0])
			at := (uintptr(unsafe.Pointer(&b[0])) + 63) &^ 63
			keep = append(keep, b[at-uintptr(unsafe.Pointer(&b[0])):][:n])
			m.at = append(m.at, uint64(at))
		}
		m.read = func(i int) []byte { return keep[i] }
		return m
	}
	index := 0
	if _, err := fmt.Sscanf(where, "cuda:%d", &index); err != nil {
		t.Fatal(err)
	}
	d, err := cuda.Open(index)
	if err != nil {
		t.Fatal(err)
	}
	mem, err := d.Alloc(sizes)
	if err != nil {
		t.Fatal(err)
	}
	var m memory
	for i := range mem {
		m.at = append(m.at, uint64(uintptr(mem[i].Ptr)))
	}
	m.read = func(i int) []byte {
		b := make([]byte, mem[i].Bytes)
		if err := d.Read(b, device.Memory{Ptr: mem[i].Ptr, Bytes: mem[i].Bytes}); err != nil {
			t.Fatal(err)
		}
		return b
	}
	m.free = func() {
		for i := range mem {
			mem[i].Release()
		}
	}
	return m
}

// filled returns the tensors of a model that are not empty. These are sent.
func filled(m *load.Model) (travel []int64) {
	for i := range m.Index().Tensors {
		if m.Index().Tensors[i].Bytes > 0 {
			travel = append(travel, int64(i))
		}
	}
	return travel
}

// Sizes of a buffer for several ranks or chunks of 1 MiB, and for a single rank.
const relayed, alone = 3 << 20, 320 << 10

// Several ranks read their shares into the same buffers. Each decodes whole tensors or its parts of them to the bytes
// that were saved, on a GPU and on the host. A single rank uses a ring of two buffers.
func TestRelay(t *testing.T) {
	loadtest.UseEngine(t)
	all, err := driver.Info()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		kind     string
		compress bool
		bytes    int64
		ranks    []int
	}{{"hostile", true, 8 << 20, []int{1, 3}}, {"tied", true, 16 << 20, []int{2}},
		{"hostile", false, 12 << 20, []int{1, 2}}} {
		_, m, _ := loadtest.WriteModel(t, save.Spec{Compress: c.compress, ChunkBytes: 64 << 10}, c.kind, c.bytes)
		travel := filled(m)
		where := []string{"cuda:0", "cpu"}
		if len(all) > 1 && c.compress {
			where = append(where, "cuda:1") // on the fake driver, a device with coherent memory
		}
		for _, where := range where {
			for _, ranks := range c.ranks {
				t.Run(fmt.Sprint(c.kind, " ", c.compress, " ", where, " ", ranks), func(t *testing.T) {
					ranksLoad(t, m, travel, where, ranks)
				})
			}
		}
	}
}

// asked returns a rank's requests, which alternate between whole tensors, rows and columns.
func asked(m *load.Model, travel []int64, rank int) (reqs []load.Request) {
	for i, at := range travel {
		x := &m.Index().Tensors[at]
		q := load.Request{Tensor: at, Hi0: plan.Whole, Hi1: plan.Whole}
		if len(x.Shape) > 1 && x.DType.Bits() >= 8 && x.Shape[0] > 2 && x.Shape[1] > 2 {
			switch (i + rank) % 3 {
			case 1:
				q.Lo0, q.Hi0 = 1, x.Shape[0]/2
			case 2:
				q.Lo1, q.Hi1 = 1, x.Shape[1]/2
			}
		}
		reqs = append(reqs, q)
	}
	return reqs
}

// sliced returns the bytes that a load to the host returns for the requests.
func sliced(t *testing.T, m *load.Model, reqs []load.Request) (all [][]byte) {
	t.Helper()
	l, err := m.Start(reqs, load.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := loadtest.Finish(t, l); err != nil {
		t.Fatal(err)
	}
	for i := range reqs {
		mem, _, _, _ := l.Take(i)
		all = append(all, bytes.Clone(mem.Slice()))
		mem.Release()
	}
	return all
}

func ranksLoad(t *testing.T, m *load.Model, travel []int64, where string, ranks int) {
	buffers := make([]int64, 32)
	if ranks == 1 { // no other rank reads the buffers, so they can be reused
		buffers = buffers[:2]
	}
	for i := range buffers {
		buffers[i] = relayed
	}
	ring := memoryOn(t, where, buffers)
	defer ring.free()
	var relays []*relay.Relay
	var got []memory
	var want [][][]byte
	for rank := range ranks {
		reqs := asked(m, travel, rank)
		want = append(want, sliced(t, m, reqs))
		sizes := make([]int64, len(reqs))
		for i := range sizes {
			sizes[i] = int64(len(want[rank][i]))
		}
		got = append(got, memoryOn(t, where, sizes))
		defer got[rank].free()
		r, err := begun(m, specOf(travel, ring, where, rank, ranks, relayed), requests(reqs, got[rank]))
		if err != nil {
			t.Fatal(err)
		}
		relays = append(relays, r)
	}
	shares, err := relays[0].ShareSizes()
	pieces := len(shares)
	if err != nil || pieces < 3 || ranks > 1 && pieces > len(buffers) {
		t.Fatalf("%d pieces, %v", pieces, err)
	}
	for k := range pieces {
		for _, r := range relays {
			if own, err := r.ShareSizes(); err != nil || !slices.Equal(own, shares) {
				t.Fatal("the ranks do not agree on the sizes of shares")
			}
			if landed, err := r.AwaitOwnShare(k, time.Minute); !landed || err != nil {
				t.Fatalf("piece %d: %v, %v", k, landed, err)
			}
		}
		for _, r := range relays {
			if err := r.DecodePiece(k, streamOf(where)); err != nil {
				t.Fatalf("piece %d: %v", k, err)
			}
			if err := r.DecodePiece(k, 0); err == nil {
				t.Fatal("a piece was decoded twice")
			}
		}
	}
	for rank, r := range relays {
		if done, err := r.Job().Wait(time.Minute); !done || err != nil {
			t.Fatalf("rank %d: %v, %v", rank, done, err)
		}
		for i := range want[rank] {
			if !bytes.Equal(got[rank].read(i), want[rank][i]) {
				t.Errorf("rank %d: %s differs", rank, m.Index().Tensors[travel[i]].Name)
			}
		}
	}
}

func streamOf(where string) uintptr {
	if where == "cpu" {
		return 0
	}
	return 1
}

// begun starts a group load and sets its requests.
func begun(m *load.Model, spec *relay.Spec, requests []load.Request) (*relay.Relay, error) {
	r, err := relay.Start(m, spec)
	if err != nil {
		return nil, err
	}
	if err = r.Aim(requests); err != nil {
		r.Job().Cancel()
		_, _ = r.Job().Wait(time.Minute) // it returns the cancellation
		return nil, err
	}
	return r, nil
}

func requests(reqs []load.Request, got memory) (out []load.Request) {
	for i, q := range reqs {
		q.Dest = uintptr(got.at[i])
		out = append(out, q)
	}
	return out
}

func specOf(travel []int64, ring memory, where string, rank, ranks int, size int64) *relay.Spec {
	spec := &relay.Spec{Tensors: travel, Ring: ring.at, Size: size, Ranks: ranks, Rank: rank}
	spec.Device, spec.Stream = where, uint64(streamOf(where))
	return spec
}

// A group load that is cancelled before or while it decodes ends and releases the device. A group load with invalid
// requests does not start.
func TestRelayEnds(t *testing.T) {
	loadtest.UseEngine(t)
	_, m, _ := loadtest.WriteModel(t, save.Spec{Compress: true, ChunkBytes: 64 << 10}, "", 2<<20)
	travel := filled(m)
	for _, where := range []string{"cuda:0", "cpu"} {
		reqs := asked(m, travel, 0)
		sizes := make([]int64, len(reqs))
		for i, b := range sliced(t, m, reqs) {
			sizes[i] = int64(len(b))
		}
		got, ring := memoryOn(t, where, sizes), memoryOn(t, where, []int64{alone, alone})
		for _, wrong := range []func(*relay.Spec, []load.Request){
			func(s *relay.Spec, _ []load.Request) { s.Rank = 1 },
			func(s *relay.Spec, _ []load.Request) { s.Ring = nil },
			func(s *relay.Spec, _ []load.Request) { s.Ring = []uint64{s.Ring[0] + 8} },
			func(s *relay.Spec, _ []load.Request) { s.Size = 30 << 10 },
			func(s *relay.Spec, _ []load.Request) { s.Ranks, s.Mapped = 300, true },
			func(s *relay.Spec, _ []load.Request) { s.Tensors = s.Tensors[1:] },
			func(s *relay.Spec, _ []load.Request) { s.Tensors[0] = math.MaxInt32 },
			func(_ *relay.Spec, q []load.Request) { q[0].Hi0 = math.MaxInt32 },
		} {
			spec, list := specOf(append([]int64(nil), travel...), ring, where, 0, 1, alone), requests(reqs, got)
			wrong(spec, list)
			if r, err := begun(m, spec, list); err == nil || !errors.Is(err, errs.ErrArgument) {
				t.Errorf("%v: %v", r != nil, err)
			}
		}
		for _, decodes := range []int{0, 1} {
			r, err := relay.Start(m, specOf(travel, ring, where, 0, 1, alone))
			if err != nil {
				t.Fatal(err)
			}
			if err := r.DecodePiece(0, 0); !errors.Is(err, errs.ErrArgument) {
				t.Errorf("DecodePiece without requests: %v", err)
			}
			for _, want := range []error{nil, errs.ErrArgument} {
				if err := r.Aim(requests(reqs, got)); !errors.Is(err, want) {
					t.Fatalf("Aim returned %v, want %v", err, want)
				}
			}
			for k := range decodes {
				if _, err := r.AwaitOwnShare(k, time.Minute); err != nil {
					t.Fatal(err)
				}
				if err := r.DecodePiece(k, streamOf(where)); err != nil {
					t.Fatal(err)
				}
			}
			if landed, err := r.AwaitOwnShare(decodes+2, 20*time.Millisecond); landed || err != nil {
				t.Errorf("piece %d of a ring of two: %v, %v", decodes+2, landed, err)
			}
			r.Job().Cancel()
			if done, err := r.Job().Wait(time.Minute); !done || !errors.Is(err, errs.ErrCancelled) {
				t.Errorf("%v, %v", done, err)
			}
			if err := r.DecodePiece(decodes, 0); !errors.Is(err, errs.ErrCancelled) {
				t.Error(err)
			}
		}
		got.free()
		ring.free()
	}
}
