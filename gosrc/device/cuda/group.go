package cuda

// This file submits several slots as one: each call of the driver takes microseconds, and
// slots that fit a core's cache are thousands a load.

// groupSlots is the most slots that are worth waiting for each other.
const groupSlots = 16

// SubmitAll is Submit for each piece, in their order. Neighbours that wait for one event and are
// loose, have no checksums, and lie as at their destinations, go up as one: each by its copies,
// and they end together. An error is one of each task of the pieces that did not go up: unlike
// Submit, it calls their done here, and returns none.
func (q *Queue) SubmitAll(pieces []FilledSlot) {
	count := 0
	defer func() { // after a panic: Close waits for every slot
		for i := range pieces {
			if s := pieces[i].Slot; i < count || s.owned {
				s.owned = false
				q.freeSlotAndJoined(s)
			}
		}
	}()
	for i := range pieces {
		p := &pieces[i]
		p.Slot.beginPiece(p.N, p.Tasks, p.Done)
		count++
	}
	for len(pieces) > 0 {
		s, n := pieces[0].Slot, 1
		for n < len(pieces) && s.tryJoinSlot(pieces[n].Slot) {
			n++
		}
		together := pieces[:n]
		pieces = pieces[n:]
		if err := q.submitJoined(s); err != nil {
			for _, p := range together {
				for i := range p.Tasks {
					p.Done(i, err)
				}
			}
		}
	}
}

// tryJoinSlot takes another slot's work into this one's, and reports whether it did.
func (s *Slot) tryJoinSlot(other *Slot) bool {
	b, o := &s.build, &other.build
	if len(b.runs) == 0 || len(o.runs) == 0 || s.c.after != other.c.after || len(s.joined)+1 == groupSlots {
		return false
	}
	s.copied += other.copied
	s.joined = append(s.joined, other)
	return true
}
