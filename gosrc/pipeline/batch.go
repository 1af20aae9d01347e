package pipeline

import (
	"context"
	"sync"

	"github.com/overwire/overwire/gosrc/source"
)

// A batch is parts that one worker does one after the other: Parts[first:end]. If
// they are one range of a source's Ranges, n is its length, gaps between them included;
// else 0.
type batch struct {
	first, end int32
	n          int64
}

// gap is how many bytes are rather read and thrown away than skipped by
// another range.
const gap = 256 << 10

// A feed gives the parts out in order.
type feed struct {
	*Task
	facts   []source.Facts  // by source
	permits context.Context // ends when there are no parts left
	empty   context.CancelFunc

	mu      sync.Mutex
	next    int   // part
	skipped int64 // bytes of gaps in ranges
}

// take returns the next batch: one part, or, for a source that is read in steps, as
// many pieces as fit one range. The latter only if permit is of that source, nil if
// the caller has none: else the batch has no parts yet, and from is where to wait
// for a permit. ok is false when there are no parts left.
//
// A worker that has a range open waits for slots; one that has a slot waits for no
// range, so that one slot will do for any number of workers.
func (q *feed) take(permit source.Ranges) (b batch, from source.Ranges, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	parts, pieces := q.Plan.Parts, q.Plan.Pieces
	if q.next == len(parts) {
		return batch{}, nil, false
	}
	first := &parts[q.next]
	b = batch{first: int32(q.next), end: int32(q.next)}
	if q.Range != nil {
		from = q.facts[pieces[first.Piece].Source].Ranges
	}
	if from != permit {
		return b, from, true
	}
	q.next++
	if from != nil {
		most := q.Range()
		b.n = first.To - first.From
		for ; q.next < len(parts); q.next++ {
			last, part := &parts[q.next-1], &parts[q.next]
			before, p := &pieces[last.Piece], &pieces[part.Piece]
			between, n := p.Off+part.From-before.Off-last.To, part.To-part.From
			if p != before && (p.Source != before.Source || between < 0 || between > gap || b.n+between+p.Len > most) {
				break
			}
			b.n += between + n
			q.skipped += between
		}
	}
	b.end = int32(q.next)
	if q.next == len(parts) {
		q.empty()
	}
	return b, from, true
}
