package pipeline

// This file compares checksums, unless the device does.

import (
	"time"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/plan"
)

// comparesSums reports whether checksums of a piece are compared: of what was read, and of bytes
// in memory that may have changed.
func (w *worker) comparesSums(p *plan.Piece) bool {
	f := &w.facts[p.Source]
	return f.View == nil || f.Compare
}

// compareSums compares the checksums of a share where it lies in memory.
func (w *worker) compareSums(view func(off, n int64) ([]byte, error), p *plan.Piece, share *plan.Share,
	t0 *time.Time) error {
	b, err := view(p.Off, p.Len)
	if err != nil {
		return w.placeError("read", p.First, err)
	}
	return w.checkShare(share, b, t0)
}

// checkShare compares the checksums of a share of the piece in b.
func (w *worker) checkShare(share *plan.Share, b []byte, t0 *time.Time) error {
	n := int64(0)
	for i := share.First; w.checks && i < share.First+share.Count; i++ {
		j := &w.Plan.Tasks[i]
		if !j.Summed { // bytes of a plain file
			continue
		}
		if err := w.checkSum(i, b[j.Src:int64(j.Src)+int64(j.Chunk.Stored)]); err != nil {
			return err
		}
		n += int64(j.Chunk.Stored)
	}
	if n > 0 { // bytes without checksums cost no time here
		w.st.CheckNS += w.lapTime("check", t0, n)
	}
	return nil
}

// checkSum compares the checksum of a chunk's stored bytes, if it has one.
func (w *worker) checkSum(task int32, stored []byte) error {
	j := &w.Plan.Tasks[task]
	if !w.checks || !j.Summed {
		return nil
	}
	if sum := codec.Sum(stored); sum != j.Chunk.Sum {
		return w.placeError("check", task, errs.NewMismatch(j.Chunk.Sum, sum))
	}
	return nil
}

// stageOf is the verb in which a task failed on the device.
func stageOf(err error) string {
	if errs.RuleOf(err) == errs.RuleChecksum {
		return "check"
	}
	return "decode"
}
