package digest

// Computes the digests of many tensors on several cores.

import (
	"context"
	"sync"

	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// share is the number of bytes that a worker sums at a time.
const share = 4 << 20

// All computes the digest of each view of host memory with several workers. The memory must not change until it
// returns.
func All(ctx context.Context, views []View, workers int) ([]Sum, error) {
	type task struct {
		view  int
		at, n int64
	}
	var tasks []task
	sizes, parts := make([]int64, len(views)), make([]View, len(views))
	for i := range views {
		n, err := views[i].Bytes()
		if err != nil {
			return nil, err
		}
		if sizes[i] = n; n > 0 {
			parts[i] = views[i].Merged()
		}
		for at := int64(0); at < n; at += share {
			tasks = append(tasks, task{i, at, min(share, n-at)})
		}
	}
	var mu sync.Mutex
	states := make([]State, len(views))
	err := spawn.Each(ctx, "digest", max(workers, 1), len(tasks), func(k int) error {
		var s State
		t := tasks[k]
		parts[t.view].addBytes(&s, t.at, t.n)
		mu.Lock()
		states[t.view].Merge(s)
		mu.Unlock()
		return nil
	})
	if err != nil {
		return nil, err
	}
	out := make([]Sum, len(views))
	for i := range out {
		out[i] = states[i].Sum(sizes[i])
	}
	return out, nil
}
