package pipeline

// This file distributes shares to the workers.

import (
	"context"
	"sync"

	"github.com/overwire/overwire/gosrc/source"
)

// A batch is a sequence of shares for one worker: Shares[first:end]. If they are read as one range, n is the length
// of the range including its gaps. Otherwise n is 0.
type batch struct {
	first, end int32
	n          int64
}

// gap is the largest gap in bytes that is read and discarded. A larger gap starts a new range.
const gap = 256 << 10

// A feed distributes the shares to the workers, in order.
type feed struct {
	task    *Task
	facts   []source.Facts  // indexed by source
	permits context.Context // ends when no shares are left
	empty   context.CancelFunc

	mu      sync.Mutex
	next    int   // next share
	skipped int64 // bytes of gaps in ranges
}

// takeBatch returns the next batch: one share or, for a source that is read in ranges, as many shares as fit one range.
// permit is the Ranges for which the caller has a permit, or nil. If the next share needs a different permit or none,
// the batch is empty, and from is the Ranges to ask for a permit, or nil. ok is false when no shares are left.
//
// A worker with an open range may wait for slots, but a worker with a slot never waits for a range. Therefore one slot
// is enough for any number of workers.
func (q *feed) takeBatch(permit source.Ranges) (b batch, from source.Ranges, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	shares, pieces := q.task.Plan.Shares, q.task.Plan.Pieces
	if q.next == len(shares) {
		return batch{}, nil, false
	}
	first := &shares[q.next]
	b = batch{first: int32(q.next), end: int32(q.next)}
	if q.task.Range != nil {
		from = q.facts[pieces[first.Piece].Source].Ranges
	}
	if from != permit {
		return b, from, true
	}
	q.next++
	if from != nil {
		most := q.task.Range()
		b.n = first.To - first.From
		for ; q.next < len(shares); q.next++ {
			last, share := &shares[q.next-1], &shares[q.next]
			before, p := &pieces[last.Piece], &pieces[share.Piece]
			between, n := p.Off+share.From-before.Off-last.To, share.To-share.From
			if p != before && (p.Source != before.Source || between < 0 || between > gap || b.n+between+p.Len > most) {
				break
			}
			b.n += between + n
			q.skipped += between
		}
	}
	b.end = int32(q.next)
	if q.next == len(shares) {
		q.empty()
	}
	return b, from, true
}
