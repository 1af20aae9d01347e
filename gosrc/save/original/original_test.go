package original

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
	"github.com/overwire/overwire/gosrc/source/file"
	"github.com/overwire/overwire/gosrc/tensor"
)

// opened returns an open safetensors file with tensors of the given sizes, its description and its content.
func opened(t *testing.T, r *rand.Rand, sizes ...int64) (*file.File, *tensor.Source, []byte) {
	t.Helper()
	var entries []safetensors.Entry
	end := int64(0)
	for i, n := range sizes {
		entries = append(entries, safetensors.Entry{Name: fmt.Sprint(i), DType: tensor.U8, Shape: []int64{n},
			Begin: end, End: end + n})
		end += n
	}
	b, err := safetensors.AppendHeader(nil, nil, entries, 8)
	if err != nil {
		t.Fatal(err)
	}
	data := int64(len(b))
	for range end {
		b = append(b, byte(r.Uint32()))
	}
	path := filepath.Join(t.TempDir(), "x")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := file.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f, &tensor.Source{URI: path, Size: int64(len(b)), Data: data, Format: tensor.FormatSafetensors}, b
}

// passAll passes the tensors of order in pieces, as an encoder does, and waits until all are hashed.
func passAll(t *testing.T, h *Hashing, r *rand.Rand, order []string, sizes []int64, content []byte) (passed int64) {
	t.Helper()
	var waits []<-chan struct{}
	for _, name := range order {
		var i int
		_, _ = fmt.Sscan(name, &i)
		off := int64(0)
		for _, n := range sizes[:i] {
			off += n
		}
		for at := int64(0); at < sizes[i]; {
			n := min(1+r.Int64N(70000), sizes[i]-at)
			if done := h.Pass(name, content[off+at:off+at+n]); done != nil {
				passed += n
				waits = append(waits, done)
			}
			if at += n; len(waits) > 2 {
				if err := h.Await(waits[0]); err != nil {
					t.Fatal(err)
				}
				waits = waits[1:]
			}
		}
	}
	for _, done := range waits {
		if err := h.Await(done); err != nil {
			t.Fatal(err)
		}
	}
	return passed
}

// The hash is correct for any order of passed tensors, and if only some are passed. Bytes that are passed in file order
// are not read again.
func TestHash(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	for round := range 40 {
		sizes := make([]int64, 1+r.IntN(8))
		var order []string
		for i := range sizes {
			sizes[i] = r.Int64N(200000)
			if sizes[i] > 0 && (round%4 == 0 || r.IntN(5) > 0) {
				order = append(order, fmt.Sprint(i))
			}
		}
		if round%4 > 0 {
			r.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		}
		f, s, b := opened(t, r, sizes...)
		o, err := Of(context.Background(), f, s, true)
		if err != nil {
			t.Fatal(err)
		}
		if err := o.Hash(context.Background(), order, 4); err != nil {
			t.Fatal(err)
		}
		h := o.Hashing()
		passed := passAll(t, h, r, order, sizes, b[s.Data:])
		if err := h.Done(); err != nil || o.SHA256 != fmt.Sprintf("%x", sha256.Sum256(b)) {
			t.Errorf("%v passed as %v: %s, %v", sizes, order, o.SHA256, err)
		}
		if all := int64(len(b)) - s.Data; round%4 == 0 && passed != all {
			t.Errorf("%d of %d bytes that were passed in order were used", passed, all)
		}
	}
	if left := spawntest.Left(); len(left) > 0 {
		t.Errorf("%v still run", left)
	}
}

// The selected tensors are in file order, and no other such selection has more bytes.
func TestInOrder(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	for range 200 {
		tensors := make([]tensor.Tensor, 1+r.IntN(9))
		var order []string
		for i := range tensors {
			tensors[i] = tensor.Tensor{Name: fmt.Sprint(i), Bytes: 1 + r.Int64N(50)}
			order = append(order, tensors[i].Name)
		}
		r.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		order = append(order[:r.IntN(len(order)+1)], "another")
		bytes := func(in func(k int) bool) int64 {
			sum, last := int64(0), -1
			for k, name := range order[:len(order)-1] {
				var i int
				if _, _ = fmt.Sscan(name, &i); in(k) {
					if i < last {
						return -1
					}
					sum, last = sum+tensors[i].Bytes, i
				}
			}
			return sum
		}
		most := int64(0)
		for set := range 1 << (len(order) - 1) {
			most = max(most, bytes(func(k int) bool { return set>>k&1 == 1 }))
		}
		chain := inOrder(order, tensors)
		if got := bytes(func(k int) bool { return chain[order[k]] }); got != most || chain["another"] {
			t.Fatalf("%v: %v has %d bytes, %d are possible", order, chain, got, most)
		}
	}
}

// The hashing fails if the file is written to meanwhile, or if it is cancelled while an encoder waits for it. No
// goroutine is left.
func TestHashEnds(t *testing.T) {
	f, s, b := opened(t, rand.New(rand.NewPCG(1, 1)), 1<<20)
	ctx, cancel := context.WithCancelCause(context.Background())
	o, err := Of(ctx, f, s, true)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(s.URI, s.Size+1); err != nil {
		t.Fatal(err)
	}
	hash := func(order ...string) *Hashing {
		if err := o.Hash(ctx, order, 4); err != nil {
			t.Fatal(err)
		}
		return o.Hashing()
	}
	var at *errs.At
	if err := hash().Done(); !errors.Is(err, errs.ErrCorrupt) || !errors.As(err, &at) || at.Source != s.URI {
		t.Errorf("a file that was written to: %v", err)
	}
	h := hash("0")
	first := h.Pass("0", b[s.Data:][:10])
	if err := h.Await(first); err != nil {
		t.Error(err)
	}
	cancel(errs.New(errs.ErrCancelled, "enough"))
	if err := h.Done(); !errors.Is(err, errs.ErrCancelled) {
		t.Errorf("cancelled: %v", err)
	}
	if err := h.Await(h.Pass("0", b[s.Data:][10:20])); !errors.Is(err, errs.ErrCancelled) {
		t.Errorf("passed to what was cancelled: %v", err)
	}
	none := (*File)(nil)
	if h, err := none.Hashing(), none.Hash(ctx, nil, 1); h.Done() != nil || err != nil ||
		h.Await(h.Pass("0", nil)) != nil {
		t.Errorf("nothing to hash: %v", err)
	}
	if left := spawntest.Left(); len(left) > 0 {
		t.Errorf("%v still run", left)
	}
}
