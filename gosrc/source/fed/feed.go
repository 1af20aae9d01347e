// Package fed provides sources whose bytes may come from a supplier in Python instead of their store. The supplier
// has pieces of objects in memory that it shares with other processes.
//
// A fed source wraps the object at its store. When a read needs a piece, the source asks the supplier. The supplier
// answers with the address of the piece, or tells the source to read its store. The blocks of a piece have checksums,
// which are compared before a byte is used, so the supplier is not trusted to keep the bytes intact. The checksums come
// from the supplier. They do not show whether it had the right bytes.
//
// A source waits for a piece while other pieces arrive. When none has arrived for two seconds, and the supplier has not
// asked for more time, the source reads its store.
//
// A source also asks for pieces that the running load has announced, so that several processes can read different
// pieces from the store at the same time.
//
// The supplier can also use a source to read a piece from the store into its memory. Credentials therefore stay in the
// engine.
package fed

import (
	"context"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/crc32c"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
)

const (
	// Block is the number of bytes of a piece that one checksum covers. A copied block is still in the L1 or L2 cache
	// when its checksum is compared. A read of part of a block copies the whole block, so blocks are small.
	Block = 64 << 10
	// unit divides the size of a piece.
	unit = 1 << 20
	// part is the size of the reads that fill a piece from its store. Up to `parts` of them run in parallel.
	part, parts = 8 << 20, 8
	// patience is how long a read waits for a piece while no other piece arrives, unless the supplier calls Wait.
	patience = 2 * time.Second
	// maxWait is the longest time for which the supplier can make reads wait for a piece while no other piece arrives.
	maxWait = time.Minute
	// maxMissed is the number of consecutive late pieces after which a source reads only from its store.
	maxMissed = 2
)

// The values of Event.What.
const (
	Ask   = "ask"   // a read needs the piece, or will need it soon: call Answer
	Late  = "late"  // the piece did not arrive in time: an answer is no longer needed
	Bad   = "bad"   // a checksum of the piece was wrong
	Free  = "free"  // the source no longer uses the memory of the piece
	Alone = "alone" // the source reads only from its store from now on
	Close = "close" // the source is closed and uses no memory of its pieces
)

// An Event tells the supplier what a source needs or no longer needs.
type Event struct {
	What string `json:"what"`
	// File is the number of the source. Name stands for one state of an object in one store. It is the same in all
	// processes, and contains no secret. URI is redacted. Size is the size of the object.
	File int64  `json:"file"`
	Name string `json:"name"`
	URI  string `json:"uri"`
	Size int64  `json:"size"`
	// Piece is the number of the piece, Bytes is its size.
	Piece int64 `json:"piece"`
	Bytes int64 `json:"bytes"`
}

// A Feed connects the sources of a process with their supplier. It is safe for concurrent use.
type Feed struct {
	size  int64 // of a piece, except the last one of an object
	ahead int   // the largest number of pieces that a source asks for before they are read

	mu      sync.Mutex
	events  []Event
	more    chan struct{} // closed when an event is added, and then replaced
	sources map[int64]*Source
	last    int64 // number of the newest source
	shut    bool
}

// New returns a feed with pieces of size bytes. A source asks for up to `ahead` pieces before they are read.
func New(size int64, ahead int) (*Feed, error) {
	if size < unit || size%unit != 0 || size > 1<<32 {
		return nil, errs.New(errs.ErrArgument, "pieces of %d bytes: expected a multiple of 1 MiB, at most 4 GiB", size)
	}
	return &Feed{size: size, ahead: ahead, more: make(chan struct{}), sources: map[int64]*Source{}}, nil
}

// current is the feed that Wrap uses.
var current struct {
	sync.Mutex
	feed *Feed
}

// Use makes Wrap use a feed. It closes the feed that was used before.
func Use(f *Feed) {
	current.Lock()
	before := current.feed
	current.feed = f
	current.Unlock()
	if before != nil {
		before.Close()
	}
}

// Wrap returns a fed source for an object at its store. store is the result of source.Options.StoreOf. It returns src
// itself if there is no supplier, or if the object has no identity, cannot be read by ranges, or is so small that it
// was read when it was opened.
func Wrap(src source.Source, store string) source.Source {
	current.Lock()
	f := current.feed
	current.Unlock()
	facts := src.Facts()
	if f == nil || facts.Ranges == nil || !facts.Settled || facts.Identity.Pin == "" || src.Size() <= source.HeadBytes {
		return src
	}
	return f.add(src, source.ObjectKey(src.URI(), store, facts.Identity.Pin, src.Size()))
}

func (f *Feed) add(src source.Source, name string) source.Source {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.shut {
		return src
	}
	f.last++
	s := &Source{Source: src, feed: f, file: f.last, name: name, pieces: map[int64]*piece{}}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	f.sources[s.file] = s
	return s
}

// tell adds an event.
func (f *Feed) tell(e Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.events = append(f.events, e)
	if e.What == Close {
		delete(f.sources, e.File)
	}
	close(f.more)
	f.more = make(chan struct{})
}

// Next returns the events since the last call. If there are none, it waits up to d for one.
func (f *Feed) Next(ctx context.Context, d time.Duration) ([]Event, error) {
	late := time.After(d)
	for {
		f.mu.Lock()
		events, more, shut := f.events, f.more, f.shut
		f.events = nil
		f.mu.Unlock()
		switch {
		case len(events) > 0:
			return events, nil
		case shut:
			return nil, errs.New(errs.ErrArgument, "the feed is closed")
		}
		select {
		case <-more:
		case <-late:
			return nil, nil
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func (f *Feed) find(file, number int64) (*Source, int64, error) {
	f.mu.Lock()
	s := f.sources[file]
	f.mu.Unlock()
	if s == nil {
		return nil, 0, errs.New(errs.ErrArgument, "file %d is not open", file)
	}
	if number < 0 || number >= sizes.CeilDiv(s.Size(), f.size) {
		return nil, 0, errs.New(errs.ErrArgument, "piece %d of file %d does not exist", number, file)
	}
	return s, min(f.size, s.Size()-number*f.size), nil
}

// Answer gives a piece to a source. The bytes must stay valid and unchanged until the source frees the piece,
// stops asking for pieces or is closed. sums has the CRC32C of each block; nil means that the bytes are known to be
// correct. bytes is nil if the source has to read its store. Answer reports whether the source uses the bytes. It does
// not if they come too late.
func (f *Feed) Answer(file, number int64, bytes []byte, sums []uint32) (bool, error) {
	s, n, err := f.find(file, number)
	if err != nil {
		return false, nil // closed since it asked
	}
	if bytes != nil && (int64(len(bytes)) != n || sums != nil && int64(len(sums)) != sizes.CeilDiv(n, Block)) {
		bytes = nil // the size is wrong: what other processes share is not trusted
		s.tell(Bad, number)
	}
	return s.settle(number, bytes, sums), nil
}

// Wait makes reads of a piece wait for it for at least d, for example because another process is reading it from the
// store. The wait ends at most maxWait after the piece was requested, or after another piece has arrived.
func (f *Feed) Wait(file, number int64, d time.Duration) {
	if s, _, err := f.find(file, number); err == nil { // otherwise it was closed since it asked
		s.extendWait(number, time.Now().Add(d))
	}
}

// Read reads a piece of a source from its store, and returns the CRC32C of each block. len(to) is the size of the
// piece.
func (f *Feed) Read(ctx context.Context, file, number int64, to []byte) ([]uint32, error) {
	s, n, err := f.find(file, number)
	if err != nil {
		return nil, err
	}
	if int64(len(to)) != n {
		return nil, errs.New(errs.ErrArgument, "piece %d of file %d has %d bytes, not %d", number, file, n, len(to))
	}
	err = spawn.Each(ctx, "feed", parts, int(sizes.CeilDiv(n, part)), func(i int) error {
		from, to := int64(i)*part, to[i*part:min(n, int64(i+1)*part)]
		return s.Source.ReadAt(ctx, to, number*f.size+from)
	})
	if err != nil {
		return nil, err
	}
	sums := make([]uint32, sizes.CeilDiv(n, Block))
	for i := range sums {
		sums[i] = crc32c.Sum(to[i*Block : min(n, int64(i+1)*Block)])
	}
	return sums, nil
}

// Close makes all sources read only from their stores, and waits until none uses memory of the supplier.
func (f *Feed) Close() {
	f.mu.Lock()
	f.shut = true
	var all []*Source
	for _, s := range f.sources {
		all = append(all, s)
	}
	close(f.more)
	f.more = make(chan struct{})
	f.mu.Unlock()
	for _, s := range all {
		s.leave(Alone)
	}
}
