package fed

// This file implements the source.

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/crc32c"
	"github.com/overwire/overwire/gosrc/source"
)

// maxIdle is the largest number of unused, partly read pieces that a source keeps.
const maxIdle = 4

// A Source is an object at its store. Some of its pieces are in memory. It implements source.Source.
type Source struct {
	source.Source // the object at its store
	feed          *Feed
	file          int64
	name          string
	ctx           context.Context // ends with Close
	cancel        context.CancelCauseFunc

	memory sync.RWMutex // held for reading by every copy from a piece
	gone   bool         // no memory of a piece may be read any more, and no piece is asked for

	mu     sync.Mutex
	pieces map[int64]*piece
	next   []int64   // pieces that were announced and not asked for
	busy   int       // pieces that were asked for and are neither freed nor read from the store
	idle   []*piece  // pieces in memory without users, least recently used first
	moved  time.Time // when the last piece was settled
	missed int       // consecutive late pieces
}

// A piece is part of an object. The supplier was asked for it. It is settled when the supplier has answered, or is
// late.
type piece struct {
	number  int64
	asked   time.Time
	settled chan struct{} // closed when the fields below are set
	bytes   []byte        // nil: read the store
	sums    []uint32
	bad     atomic.Bool  // a block has a wrong checksum: read the store
	read    atomic.Int64 // bytes copied

	// Guarded by the source's mu.
	users int
	used  bool      // a read has held it
	done  bool      // settled is closed
	until time.Time // reads wait at least until then, because the supplier asked for more time
}

func (s *Source) tell(what string, number int64) {
	size := s.feed.size
	s.feed.tell(Event{What: what, File: s.file, Name: s.name, URI: errs.RedactURI(s.URI()), Size: s.Size(),
		Piece: number, Bytes: min(size, s.Size()-number*size)})
}

// Facts implements source.Source. The identity is that of the object at its store, because the bytes are the same.
func (s *Source) Facts() source.Facts {
	f := s.Source.Facts()
	n := f.RangeBytes
	f = f.ReadAtOnly()
	f.RangeBytes, f.Ranges, f.Prefetch, f.Doubt = n, s, s.announceRange, s.doubtRange
	return f
}

// hold returns a piece that stays in memory until release. It asks for a piece that it does not have.
func (s *Source) hold(number int64) *piece {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pieces[number]
	if p == nil {
		p = s.askFor(number)
	}
	if !p.used {
		p.used = true
		s.next = slices.DeleteFunc(s.next, func(one int64) bool { return one == number })
	}
	if p.users++; p.users == 1 {
		s.idle = slices.DeleteFunc(s.idle, func(one *piece) bool { return one == p })
	}
	return p
}

// askFor asks for a piece. The caller holds s.mu.
func (s *Source) askFor(number int64) *piece {
	p := &piece{number: number, asked: time.Now(), settled: make(chan struct{})}
	s.pieces[number] = p
	s.busy++
	if s.isGone() {
		s.finish(p, nil, nil)
	} else {
		s.tell(Ask, number)
	}
	return p
}

// announceRange asks for the pieces of a range that will be read soon, when there is room for them.
func (s *Source) announceRange(off, n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for number := max(0, off) / s.feed.size; number*s.feed.size < min(off+n, s.Size()); number++ {
		if s.pieces[number] == nil && !slices.Contains(s.next, number) {
			s.next = append(s.next, number)
		}
	}
	s.askAhead()
}

// doubtRange makes the source read the pieces of a range from the store. It returns false if it has done so before.
func (s *Source) doubtRange(off, n int64) (doubted bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for number := off / s.feed.size; number*s.feed.size < off+n; number++ {
		p := s.pieces[number]
		switch {
		case p == nil: // read completely, and freed
			p = s.readFromStore(number)
		case p.bytes == nil && !p.bad.Load():
			continue
		}
		if !p.bad.Swap(true) {
			s.tell(Bad, number)
		}
		doubted = true
	}
	return doubted
}

// readFromStore makes the source read a piece from the store. The caller holds s.mu.
func (s *Source) readFromStore(number int64) *piece {
	p := &piece{number: number, settled: make(chan struct{}), used: true, done: true}
	close(p.settled)
	s.pieces[number] = p
	return p
}

// askAhead asks for pieces that were announced. The caller holds s.mu.
func (s *Source) askAhead() {
	for len(s.next) > 0 && s.busy < s.feed.ahead && !s.isGone() {
		s.askFor(s.next[0])
		s.next = s.next[1:]
	}
}

// release undoes hold. A piece that was read completely is freed.
func (s *Source) release(p *piece) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.users--; p.users == 0 && p.bytes != nil {
		s.rest(p)
	}
}

// rest frees a piece without users, or keeps it for later reads. The caller holds s.mu.
func (s *Source) rest(p *piece) {
	if !p.bad.Load() && p.read.Load() < int64(len(p.bytes)) {
		if s.idle = append(s.idle, p); len(s.idle) <= maxIdle {
			return
		}
		p, s.idle = s.idle[0], s.idle[1:]
	}
	if s.pieces[p.number] != p {
		return // freed by leave
	}
	delete(s.pieces, p.number)
	if p.bad.Load() {
		s.readFromStore(p.number).bad.Store(true)
	}
	s.busy--
	s.tell(Free, p.number)
	s.askAhead()
}

// finish settles a piece. The caller holds s.mu.
func (s *Source) finish(p *piece, bytes []byte, sums []uint32) {
	p.bytes, p.sums, p.done = bytes, sums, true
	close(p.settled)
	if bytes == nil {
		s.busy--
	}
}

// settle gives a piece to its readers. It returns false if the bytes are not used.
func (s *Source) settle(number int64, bytes []byte, sums []uint32) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pieces[number]
	if p == nil || p.done {
		return false
	}
	s.moved = time.Now()
	s.finish(p, bytes, sums)
	if bytes == nil {
		s.askAhead()
		return false
	}
	s.missed = 0
	if p.users == 0 && p.used {
		s.rest(p)
	}
	return true
}

// extendWait makes reads wait longer for a piece, but never longer than maxWait since a piece was settled. Otherwise a
// supplier that never delivers a piece could stop a load.
func (s *Source) extendWait(number int64, until time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pieces[number]
	if p == nil {
		return
	}
	end := p.asked
	if s.moved.After(end) {
		end = s.moved
	}
	if end = end.Add(maxWait); until.After(end) {
		until = end
	}
	if until.After(p.until) {
		p.until = until
	}
}

// waitEnd returns the time at which a read gives a piece up. since is when the read began to wait. The caller holds
// s.mu.
func (s *Source) waitEnd(p *piece, since time.Time) time.Time {
	if s.moved.After(since) {
		since = s.moved
	}
	if since = since.Add(patience); p.until.After(since) {
		return p.until
	}
	return since
}

// await waits until a piece is settled.
func (s *Source) await(ctx context.Context, p *piece) error {
	since := time.Now()
	for {
		s.mu.Lock()
		late := time.NewTimer(time.Until(s.waitEnd(p, since)))
		s.mu.Unlock()
		select {
		case <-p.settled:
			late.Stop()
			return nil
		case <-ctx.Done():
			late.Stop()
			return context.Cause(ctx)
		case <-s.ctx.Done():
			late.Stop()
			return errs.Place("read", s.URI(), "", -1, context.Cause(s.ctx))
		case <-late.C:
			s.giveUp(p, since)
		}
	}
}

// giveUp settles a piece that is late.
func (s *Source) giveUp(p *piece, since time.Time) {
	s.mu.Lock()
	if p.done || time.Now().Before(s.waitEnd(p, since)) {
		s.mu.Unlock()
		return
	}
	s.moved = time.Now()
	s.finish(p, nil, nil)
	s.missed++
	alone := s.missed >= maxMissed
	s.mu.Unlock()
	s.tell(Late, p.number)
	if alone {
		s.leave(Alone)
	}
}

// leave makes the source read only from its store. When it returns, no memory of a piece is in use.
func (s *Source) leave(what string) {
	s.memory.Lock()
	s.gone = true
	s.memory.Unlock()
	s.mu.Lock()
	for _, p := range s.pieces {
		if !p.done {
			s.finish(p, nil, nil)
		}
	}
	clear(s.pieces)
	s.idle, s.next, s.busy = nil, nil, 0
	s.mu.Unlock()
	s.tell(what, 0)
}

// isGone reports whether leave was called.
func (s *Source) isGone() bool {
	s.memory.RLock()
	defer s.memory.RUnlock()
	return s.gone
}

// copyFrom copies bytes of a settled piece that the caller holds. It returns false if they have to be read from the
// store. own is a buffer for a block that is read only in part.
func (s *Source) copyFrom(p *piece, to []byte, from int64, own *[]byte) bool {
	s.memory.RLock()
	defer s.memory.RUnlock()
	if s.gone || p.bytes == nil || p.bad.Load() {
		return false
	}
	if p.sums == nil {
		p.read.Add(int64(copy(to, p.bytes[from:])))
		return true
	}
	for at, rest := from, to; len(rest) > 0; {
		i := at / Block
		shared := p.bytes[i*Block : min(int64(len(p.bytes)), (i+1)*Block)]
		skip := int(at - i*Block)
		n := min(len(rest), len(shared)-skip)
		checked := rest[:n] // the copy, because the shared bytes may change after any check
		if n < len(shared) {
			*own = append((*own)[:0], shared...)
			checked = *own
		} else {
			copy(checked, shared)
		}
		if crc32c.Sum(checked) != p.sums[i] {
			if !p.bad.Swap(true) {
				s.tell(Bad, p.number)
			}
			return false
		}
		if n < len(shared) {
			copy(rest[:n], (*own)[skip:])
		}
		at, rest = at+int64(n), rest[n:]
	}
	p.read.Add(int64(len(to)))
	return true
}

// ReadAt implements source.Source. Reads within the first source.HeadBytes go to the wrapped source, which read them
// when it was opened.
func (s *Source) ReadAt(ctx context.Context, p []byte, off int64) error {
	if n := int64(len(p)); off < 0 || n == 0 || off > s.Size() || n > s.Size()-off || off+n <= source.HeadBytes ||
		ctx.Err() != nil || s.isGone() {
		return s.Source.ReadAt(ctx, p, off)
	}
	r := span{s: s}
	defer r.Close()
	r.take(ctx, off, int64(len(p)))
	return r.Next(p)
}

// Close implements source.Source.
func (s *Source) Close() error {
	if s.ctx.Err() == nil {
		s.cancel(errs.New(errs.ErrArgument, "the source is closed"))
		s.leave(Close)
	}
	return s.Source.Close()
}

// AtOnce implements source.Ranges.
func (s *Source) AtOnce() int { return s.Source.Facts().Ranges.AtOnce() }

// OpenRange implements source.Ranges. A range needs no permit, because most ranges send no request to the store.
func (s *Source) OpenRange(ctx context.Context) (source.Range, error) {
	switch {
	case s.ctx.Err() != nil:
		return nil, errs.Place("read", s.URI(), "", -1, context.Cause(s.ctx))
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	}
	return &span{s: s}, nil
}

// A span is a range of a fed source. It holds its pieces until Close.
type span struct {
	s       *Source
	ctx     context.Context
	at, end int64
	held    []*piece
	own     []byte       // a copy of a block
	store   source.Range // reads the whole range from the store; nil if pieces are used
	waited  time.Duration
}

func (r *span) take(ctx context.Context, off, n int64) {
	r.ctx, r.at, r.end = ctx, off, off+n
	for number := off / r.s.feed.size; number*r.s.feed.size < r.end; number++ {
		r.held = append(r.held, r.s.hold(number))
	}
}

// Begin implements source.Range. If the first piece has to be read from the store, the whole range is read
// from there.
func (r *span) Begin(ctx context.Context, off, n int64) error {
	s := r.s
	isInside := off >= 0 && n >= 0 && off <= s.Size() && n <= s.Size()-off
	if isInside && n > 0 && !s.isGone() && ctx.Err() == nil {
		r.take(ctx, off, n)
		began := time.Now()
		err := s.await(ctx, r.held[0])
		r.waited += time.Since(began)
		if err != nil || r.held[0].bytes != nil {
			return err
		}
		r.drop()
	}
	store, err := s.Source.Facts().Ranges.OpenRange(ctx)
	if err != nil {
		return err
	}
	r.store = store
	return store.Begin(ctx, off, n)
}

// Next implements source.Range.
func (r *span) Next(p []byte) error {
	s := r.s
	switch {
	case r.store != nil:
		return r.store.Next(p)
	case r.ctx.Err() != nil:
		return context.Cause(r.ctx)
	case int64(len(p)) > r.end-r.at:
		return errs.Place("read", s.URI(), "", r.at, errs.New(errs.ErrEngine,
			"%d bytes requested, but the range has %d left", len(p), r.end-r.at))
	}
	for len(p) > 0 {
		number := r.at / s.feed.size
		one := r.held[number-r.held[0].number]
		from := r.at - number*s.feed.size
		n := min(int64(len(p)), s.feed.size-from)
		if err := s.await(r.ctx, one); err != nil {
			return err
		}
		if !s.copyFrom(one, p[:n], from, &r.own) {
			if err := s.Source.ReadAt(source.Urgent(r.ctx), p[:n], r.at); err != nil {
				return err
			}
		}
		p, r.at = p[n:], r.at+n
	}
	return nil
}

// Waited implements source.Range.
func (r *span) Waited() (permit, answer time.Duration) {
	if r.store != nil {
		permit, answer = r.store.Waited()
	}
	answer += r.waited
	r.waited = 0
	return permit, answer
}

func (r *span) drop() {
	for _, p := range r.held {
		r.s.release(p)
	}
	r.held = nil
}

// Close implements source.Range.
func (r *span) Close() error {
	r.drop()
	if r.store != nil {
		return r.store.Close()
	}
	return nil
}
