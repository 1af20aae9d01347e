package pipeline

import "github.com/overwire/overwire/gosrc/source"

// A batch is parts that one worker does in a row: Parts[first:end]. If they are
// one range of a source.Ranged, n is its length, gaps between them included;
// else 0.
type batch struct {
	first, end int32
	n          int64
}

// gap is how many bytes are rather read and thrown away than skipped by
// another range.
const gap = 256 << 10

// wide says whether a range goes on from one piece into the next, each of which
// is then one worker's. Whoever has a range open waits for a slot, or for room, and
// those who have them may wait for his permit to open one: so there must be a slot
// for everybody, and no gate.
func (t *Task) wide(workers int) bool {
	return t.Gate == nil && (t.Lane == nil || t.Lane.Slots() >= workers && t.Range >= t.Plan.Slot)
}

// batched cuts the parts into batches, of one part each unless the task has a
// Range; skipped is the bytes of the gaps.
func batched(t *Task, wide bool) (out []batch, skipped int64) {
	parts, pieces := t.Plan.Parts, t.Plan.Pieces
	out = make([]batch, 0, len(parts))
	for i := range parts {
		p := &pieces[parts[i].Piece]
		n := parts[i].To - parts[i].From
		if _, ok := t.Sources[p.Source].(source.Ranged); t.Range == 0 || !ok {
			out = append(out, batch{first: int32(i), end: int32(i + 1)})
			continue
		}
		if k := len(out) - 1; k >= 0 && out[k].n > 0 {
			last := &parts[i-1]
			before := &pieces[last.Piece]
			between, more := p.Off+parts[i].From-before.Off-last.To, n
			if before != p {
				more = p.Len // all of it or nothing
			}
			if before.Source == p.Source && (before == p || wide) && 0 <= between && between <= gap && out[k].n+between+more <= t.Range {
				out[k].end, out[k].n = int32(i+1), out[k].n+between+n
				skipped += between
				continue
			}
		}
		out = append(out, batch{int32(i), int32(i + 1), n})
	}
	return out, skipped
}
