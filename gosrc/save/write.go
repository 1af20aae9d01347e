package save

// This file has the save itself, and the writer of safetensors files and
// containers.

import (
	"context"
	"io/fs"
	"sync"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/ordered"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/save/original"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/zeebo/xxh3"
)

// A writer is one save: one or more files that appear together.
type writer struct {
	spec    Spec
	job     *job.Job
	threads int
	start   time.Time

	clock     clock
	gpus      []*gpu
	stage     *stagingMemory       // nil: files are written as their bytes are made
	onGPU     atomic.Int64         // bytes that GPUs have encoded
	cores     chan struct{}        // one for each chunk that the host encodes now
	mu        sync.Mutex           // of originals and places
	originals map[string]*Original // of the files written so far, by path
	places    map[string]*atomicfile.Place
	ours      map[string]bool // files of other models, by name, that are converted with this one
	complete  func() error    // if not nil, called before publishing: whether what was read is one state
}

func newWriter(spec Spec, j *job.Job) *writer {
	if j == nil {
		j = job.New("save")
	}
	w := &writer{spec: spec, job: j, threads: knob.Workers(spec.Threads), start: time.Now(),
		originals: map[string]*Original{}, places: map[string]*atomicfile.Place{}}
	w.cores = make(chan struct{}, w.threads)
	return w
}

type outputFile struct {
	path     string
	metadata map[string]string
	items    []*item
	// what the file is instead of items: an index.json, a copy, or one that was laid out elsewhere
	laid     *Laid
	copied   bool           // laid is a copy of another file
	shard    bool           // the index lists it
	listing  *listing       // of an index.json; nil: it is none
	like     string         // a file whose mode it gets; "": see files.like
	mode     fs.FileMode    // the most rights of a new file; 0: no limit
	original *original.File // the file with exactly these tensors and metadata, if known
}

// A draft is one file that is being written. Readers do not see it until its
// destination is published; see source.Draft.
type draft interface {
	URI() string
	Write(p []byte, off int64) error
	// WriteView is Write of bytes that stay until the save ends.
	WriteView(p []byte, off int64) error
	Skip(lo, hi int64) error
	Finish(size int64) error
}

// A destination takes the files of one save and publishes them together.
type destination interface {
	// create begins the file of part i. It is safe for concurrent use.
	create(ctx context.Context, i int, p *outputFile) (draft, error)
	// publishAll gives the finished files their names, the last one being the file
	// that readers look for. Then it removes what is left of the old model.
	publishAll(ctx context.Context, parts []outputFile) error
	// drop ends the save and removes what was not published; err is the outcome of
	// the save.
	dropAll(err error)
}

// saveAll writes the files and publishes them together; the last one is the file that
// readers look for. A save that fails leaves nothing.
func (w *writer) saveAll(ctx context.Context, parts []outputFile) (rep Report, err error) {
	if len(parts) == 0 {
		return rep, nil
	}
	for _, p := range parts {
		if !formatOf(p.path).coded {
			for _, t := range p.items {
				t.form, t.of = plain, nil
			}
		}
	}
	w.countParts(parts, &rep)
	if err := checkListable(parts); err != nil {
		return Report{}, err
	}
	if err := w.refuseBeside(ctx, parts); err != nil {
		return Report{}, err
	}
	if err := w.chooseNames(ctx, parts); err != nil {
		return Report{}, err
	}
	to, err := w.newDestination(parts)
	if err != nil {
		return Report{}, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer func() {
		to.dropAll(err)
		if err != nil {
			rep = Report{}
		}
	}()
	sizes, err := w.writeFiles(ctx, cancel, to, parts, &rep)
	if err != nil {
		return rep, err
	}
	for i, p := range parts {
		rep.Files = append(rep.Files, p.path)
		if p.copied {
			rep.Copied = append(rep.Copied, p.path)
			rep.BytesCopied += sizes[i]
		} else {
			rep.BytesOut += sizes[i]
		}
		if o := w.originals[p.path]; o != nil {
			rep.Originals = append(rep.Originals, *o)
		}
	}
	if err := errs.Cause(ctx); err != nil {
		return rep, err
	}
	if w.complete != nil {
		if err := w.complete(); err != nil {
			return rep, err
		}
	}
	start := time.Now()
	if err := to.publishAll(ctx, parts); err != nil {
		return rep, err
	}
	addLap(&w.clock.publish, start)
	rep.Stages = w.clock.listStages()
	rep.Ratio = ratioOf(rep.BytesOut, rep.BytesIn)
	return rep, nil
}

// write writes one file and returns its size.
func (w *writer) write(ctx context.Context, to draft, share writerShare, p outputFile) (int64, error) {
	if p.laid != nil {
		return p.laid.Bytes, p.laid.Fill(ctx, to.Write)
	}
	return formatOf(p.path).write(ctx, w, to, share, p)
}

func (w *writer) newDestination(parts []outputFile) (destination, error) {
	if source.Remote(w.spec.Path) {
		return &objects{writer: w, drafts: make([]source.Draft, len(parts))}, nil
	}
	if err := w.checkRoom(parts); err != nil {
		return nil, err
	}
	like, err := w.like(parts)
	if err != nil {
		return nil, err
	}
	return &files{writer: w, like: like, targets: make([]*atomicfile.Target, len(parts))}, nil
}

// bytes is the size of a part that has no tensors.
func (p *outputFile) bytes() int64 {
	if p.laid == nil {
		return 0
	}
	return p.laid.Bytes
}

// most is an upper bound of the part's size.
func (p *outputFile) most() int64 {
	n := p.bytes() + 256<<20 // header and index, at their largest
	for _, t := range p.items {
		n += t.bytes + t.bytes/128 + 8192 // data may begin on a page
	}
	return n
}

func (w *writer) countParts(parts []outputFile, rep *Report) {
	for _, p := range parts {
		for _, t := range p.items {
			rep.Tensors++
			rep.BytesIn += t.bytes
			switch t.form {
			case compressed:
				rep.Compressed++
			case alias:
				rep.Aliases++
			}
		}
	}
	w.job.TotalBytes.Store(w.job.Bytes.Load() + rep.BytesIn) // a tree copies files beside the model, too
	w.job.TotalTensors.Store(w.job.Tensors.Load() + int64(rep.Tensors))
}

// fileWriter writes one file of tensors.
type fileWriter struct {
	*writer
	draft
	share  writerShare
	packs  map[*gpu][]*pack
	path   string
	part   outputFile
	order  []*item          // in the order of their data
	lay    *overwire.Layout // of a container; nil: a plain file
	front  []byte           // the header of a plain file
	again  *original.Copy   // of a plain file that is written again as an original; or nil
	start  int64            // offset of the data
	pos    int64            // end of the last data that was placed
	tasks  []task
	starts []int // of the batches in tasks, and the end of the last one
	slots  []*slot
	hasher xxh3.Hasher
	enc    []*codec.Encoder // one per worker; nil: not used yet
}

// A task is one chunk to write; or, with n 0, a whole tensor to hash first, since
// the order of its chunks is not that of its bytes.
type task struct {
	t            *item
	part         int32
	n            int32
	off          int64 // in the part
	chunk        int   // its record
	begins, ends bool  // the tensor's first chunk, its last
	pack         *pack // instead: chunks that a GPU encodes
}

// write returns the size of the file.
func (f *fileWriter) write(ctx context.Context) (int64, error) {
	if err := f.planFile(); err != nil {
		return 0, errs.In("save", f.path, err)
	}
	f.pos = f.start
	window, workers := f.windowSize()
	f.divideBatches()
	f.takeSlots(window, workers)
	defer f.returnSlots()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if err := f.part.original.Hash(ctx, f.orderedNames(), window); err != nil {
		return 0, errs.In("save", f.path, err)
	}
	// A step that fails, or panics, ends those that wait for the hashing or for a slot of a GPU, by its error.
	step := func(k int, do func(s *slot, first, end int) error) error {
		err := errs.New(errs.ErrEngine, "a step of the save did not end")
		defer func() {
			if err != nil {
				cancel(err)
			}
		}()
		err = do(f.slots[k%window], f.starts[k], f.starts[k+1])
		return err
	}
	o := ordered.Tasks{
		N: len(f.starts) - 1, Window: window, Workers: workers,
		Work: func(worker, k int) error {
			return step(k, func(s *slot, first, end int) error { return f.encodeBatch(ctx, worker, s, first, end) })
		},
		Turn: func(k int) error {
			return step(k, func(s *slot, first, end int) error { return f.placeBatch(ctx, s, first, end) })
		},
		Flush: func(k int) error { return step(k, f.flushBatch) },
	}
	err := firstError(ctx, o.Run(ctx, "save.encode"))
	if err != nil {
		cancel(err)
	}
	if herr := f.part.original.Hashing().Done(); err == nil {
		err = herr
	}
	f.clock.hash.Add(int64(f.part.original.Hashing().BusyTime()))
	if err == nil && f.again != nil {
		err = f.again.Done()
	}
	if err != nil {
		return 0, errs.In("save", f.path, err)
	}
	if o := f.part.original; o != nil {
		f.mu.Lock()
		f.originals[f.part.path] = &Original{File: f.part.path, SHA256: o.SHA256,
			Compared: f.again != nil && f.again.Compared}
		f.mu.Unlock()
	}
	front, size, err := f.sealFront()
	if err != nil {
		return 0, errs.In("save", f.path, err)
	}
	return size, f.draft.Write(front, 0)
}

// windowSize is how many tasks may be under way, and how many goroutines run them. Where
// GPUs encode, one of these is always free for the steps that come in order.
func (f *fileWriter) windowSize() (window, workers int) {
	window, workers = 2*f.share.threads+4, f.share.threads
	for g := range f.packs {
		window = max(window, g.SlotCount()/f.share.of)
	}
	if len(f.packs) > 0 {
		workers = window + 1
	}
	return window, workers
}

// orderedNames are the tensors whose bytes come in order, by name.
func (f *fileWriter) orderedNames() (order []string) {
	for _, t := range f.order {
		if t.form != alias && t.bytes > 0 && t.parts == 1 {
			order = append(order, t.name)
		}
	}
	return order
}
