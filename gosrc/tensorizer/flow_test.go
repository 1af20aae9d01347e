package tensorizer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"
)

// Flows of any size and kind, concurrent or in order, pass all their bytes in order and have the correct sums.
func TestRun(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	pool := make([]byte, 2*readPiece+1000)
	for i := range pool {
		pool[i] = byte(i*i>>8 + i)
	}
	for _, n := range []int{0, 1, 2, 7, 8, 9, 16, 17, 24, 33, 40} {
		data, passed := make([][]byte, n), make([]bytes.Buffer, n)
		flows := make([]Flow, n)
		var done atomic.Int64
		for i := range flows {
			data[i] = pool[i:][:[]int{0, 1, memoryPiece, memoryPiece + 1, 2*readPiece + 5, r.IntN(300000)}[r.IntN(6)]]
			f := &flows[i]
			*f = Flow{Sum: NewSummer([]byte("before")), Bytes: int64(len(data[i])), Memory: data[i]}
			if n%2 == 0 {
				f.Memory, f.Step = nil, int64(r.IntN(3000))
				f.Next = func(_ context.Context, buf []byte, off int64) ([]byte, error) {
					if f.Step > 0 && off%f.Step != 0 {
						return nil, errors.New("the offset is not a multiple of Step")
					}
					return buf[:copy(buf, data[i][off:])], nil
				}
			}
			f.Pass = func(p []byte) error { _, err := passed[i].Write(p); return err }
			f.Done = func() error { done.Add(1); return nil }
		}
		if err := Run(t.Context(), "test", 1+r.IntN(3), r.IntN(4) == 0, flows); err != nil {
			t.Fatal(err)
		}
		for i := range flows {
			crc, sha := flows[i].Sum.Sums()
			all := append([]byte("before"), data[i]...)
			if want := sha256.Sum256(all); !bytes.Equal(passed[i].Bytes(), data[i]) || !bytes.Equal(sha, want[:]) ||
				le.Uint32(crc) != crc32.ChecksumIEEE(all) {
				t.Fatalf("flow %d of %d, %d bytes", i, n, len(data[i]))
			}
		}
		if done.Load() != int64(n) {
			t.Fatalf("Done was called %d times, want %d", done.Load(), n)
		}
	}
}

// An error in any function, or a cancelled context, ends the run.
func TestRunFails(t *testing.T) {
	bad := errors.New("bad")
	for _, where := range []string{"next", "pass", "done", "cancel"} {
		ctx, cancel := context.WithCancelCause(t.Context())
		flows := make([]Flow, 20)
		for i := range flows {
			fail := func(here string) error {
				if here == where && i == 13 {
					if where == "cancel" {
						cancel(bad)
						return nil
					}
					return bad
				}
				return nil
			}
			flows[i] = Flow{Sum: NewSummer(nil), Bytes: 3 * readPiece,
				Next: func(_ context.Context, buf []byte, _ int64) ([]byte, error) { return buf, fail("next") },
				Pass: func([]byte) error { return errors.Join(fail("pass"), fail("cancel")) },
				Done: func() error { return fail("done") }}
		}
		if err := Run(ctx, "test", 2, false, flows); !errors.Is(err, bad) {
			t.Errorf("%s: %v", where, err)
		}
		cancel(nil)
	}
}

// BenchmarkRun hashes memory with one worker, in order and not in order.
func BenchmarkRun(b *testing.B) {
	data := make([]byte, 256<<20)
	for i := range data {
		data[i] = byte(i * i >> 3)
	}
	const size = 4<<20 + 4096
	for _, inOrder := range []bool{true, false} {
		b.Run(fmt.Sprintf("inOrder=%v", inOrder), func(b *testing.B) {
			b.SetBytes(int64(len(data)) / size * size)
			for b.Loop() {
				var flows []Flow
				for at := 0; at+size <= len(data); at += size {
					flows = append(flows, Flow{Sum: NewSummer([]byte("before")), Bytes: size,
						Memory: data[at : at+size]})
				}
				if err := Run(b.Context(), "bench", 1, inOrder, flows); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	b.Run("crc32", func(b *testing.B) {
		b.SetBytes(int64(len(data)))
		for b.Loop() {
			crc32.ChecksumIEEE(data)
		}
	})
	b.Run("crc32 in cache", func(b *testing.B) {
		b.SetBytes(1 << 18)
		for b.Loop() {
			crc32.ChecksumIEEE(data[:1<<18])
		}
	})
}
