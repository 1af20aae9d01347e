package save

// This file names and writes the files of a save, several in parallel, publishes them, and times its stages.

import (
	"context"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/save/original"
	"github.com/overwire/overwire/gosrc/save/publish"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/stored"
)

const (
	// mostWriters is the maximum number of files that are written in parallel. File systems
	// allow only one writer at a time in a file.
	mostWriters = 8
	// leastThreads is the minimum number of threads of a writer. With fewer, it is just as
	// fast to write one file after another with all threads.
	leastThreads = 4
)

// A Writer is one save of files that are published together. The caller classifies items, divides them into files, and
// writes the files once.
type Writer struct {
	session
	target Target
	start  time.Time

	// Complete, if not nil, is called before publishing. It returns an error if the sources have changed.
	Complete func() error
	// Others holds the names of other models' files that are written to the same folder. If it is not nil, a single
	// file may be next to a shard index, as for Spec.Beside.
	Others map[string]bool
	// OnPublish, if not nil, gets each published object of a store; see publish.Publication.
	OnPublish func(source.Draft)
}

// NewWriter begins a save to a target. Resolve must have checked the Spec. j may be nil.
func NewWriter(target Target, spec *Spec, j *job.Job) *Writer {
	if j == nil {
		j = job.New("save")
	}
	threads := knob.Workers(spec.Threads)
	return &Writer{session: session{spec: spec, job: j, threads: threads, cores: make(chan struct{}, threads)},
		target: target, start: time.Now()}
}

// Classify checks items, and chooses how they are stored if the file may contain compressed tensors.
func (w *Writer) Classify(ctx context.Context, items []*Item) error {
	if err := checkItems(w.target.Path, items); err != nil {
		return err
	}
	return w.classify(ctx, items)
}

func (w *Writer) classify(ctx context.Context, items []*Item) error {
	if !w.spec.Compress || !w.target.Coded() {
		return nil
	}
	c := classifier{spec: w.spec, path: w.target.Path, threads: w.threads}
	return c.classify(ctx, items)
}

// prepare classifies items in memory, divides them into files, and takes the memory that the save needs.
func (w *Writer) prepare(ctx context.Context, items []*Item) ([]File, error) {
	if err := checkItems(w.target.Path, items); err != nil {
		return nil, err
	}
	if w.target.Coded() {
		if err := w.gpus.open(w.spec, items); err != nil {
			return nil, errs.In("save", w.target.Path, err)
		}
	}
	if err := w.classify(ctx, items); err != nil {
		return nil, err
	}
	for _, t := range items {
		if a, ok := t.body.(*deviceBody); ok {
			a.ahead = nil
		}
	}
	files := w.Divide(w.spec.Metadata, items)
	if w.spec.Staging != nil {
		return files, w.takeStage(files)
	}
	return files, errs.In("save", w.target.Path, w.gpus.takeRings())
}

// Divide divides classified items into one file, or into shards with an index.
func (w *Writer) Divide(metadata map[string]string, items []*Item) []File {
	return divideShards(w.target.Path, w.spec.Shard, metadata, items)
}

// Threads returns how many cores the save uses.
func (w *Writer) Threads() int { return w.threads }

// Plan marks the end of planning in the save's Stages.
func (w *Writer) Plan() { addLap(&w.clock.plan, w.start) }

// Write writes the files and publishes them together. The last file is the one that readers look for. A save that fails
// leaves no files.
func (w *Writer) Write(ctx context.Context, files []File) (rep Report, err error) {
	if len(files) == 0 {
		return rep, nil
	}
	all := make([]*publish.File, len(files))
	for i := range files {
		f := &files[i]
		if !w.target.At(f.Path).Coded() {
			for _, t := range f.Items {
				t.form, t.of = plain, nil
			}
		}
		f.estimate()
		all[i] = &f.File
	}
	w.count(files, &rep)
	to, err := publish.Begin(ctx, &publish.Publication{Path: w.target.Path, Remote: w.target.Remote,
		Sharded: w.spec.Shard > 0, AllowIndex: w.spec.Beside || w.Others != nil, Like: w.spec.Like, Others: w.Others,
		Options: w.spec.Storage.Options, FS: w.spec.FS, Job: w.job, WriteTime: &w.clock.write,
		OnPublish: w.OnPublish}, all)
	if err != nil {
		return Report{}, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer func() {
		to.Drop(err)
		if err != nil {
			rep = Report{}
		}
	}()
	results, err := w.writeFiles(ctx, cancel, to, files, &rep)
	if err != nil {
		return rep, err
	}
	for i := range files {
		path := files[i].Path
		rep.Files = append(rep.Files, path)
		if files[i].Copied {
			rep.Copied = append(rep.Copied, path)
			rep.BytesCopied += results[i].size
		} else {
			rep.BytesOut += results[i].size
		}
		if o := results[i].original; o != nil {
			rep.Originals = append(rep.Originals, *o)
		}
	}
	if err := errs.In("save", w.target.Path, errs.Cause(ctx)); err != nil {
		return rep, err
	}
	if w.Complete != nil {
		if err := w.Complete(); err != nil {
			return rep, err
		}
	}
	start := time.Now()
	if err := to.Publish(ctx); err != nil {
		return rep, err
	}
	addLap(&w.clock.publish, start)
	rep.Stages = w.clock.listStages()
	rep.Ratio = stored.Ratio(rep.BytesOut, rep.BytesIn)
	return rep, nil
}

// count sets the numbers of tensors and bytes in the report and the job.
func (w *Writer) count(files []File, rep *Report) {
	for i := range files {
		for _, t := range files[i].Items {
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
	w.job.TotalBytes.Store(w.job.Bytes.Load() + rep.BytesIn) // one job may convert several models
	w.job.TotalTensors.Store(w.job.Tensors.Load() + int64(rep.Tensors))
}

// writeFiles creates and writes all files. The first error cancels the rest.
func (w *Writer) writeFiles(ctx context.Context, cancel context.CancelCauseFunc, to publish.Destination, files []File,
	rep *Report) ([]written, error) {
	all := w.divideWriters(len(files))
	free := make(chan writerShare, len(all))
	for _, share := range all {
		free <- share
	}
	drafts, out := make([]source.Output, len(files)), make([]written, len(files))
	each := func(do func(i int, share writerShare) error) error {
		return firstError(ctx, spawn.Each(ctx, "save.file", len(all), len(files), func(i int) error {
			share := <-free
			defer func() { free <- share }()
			err := do(i, share)
			if err != nil && drafts[i] != nil {
				err = errs.In("save", drafts[i].URI(), err)
			}
			if err != nil {
				cancel(err)
			}
			return err
		}))
	}
	err := each(func(i int, share writerShare) (err error) {
		if drafts[i], err = to.Create(ctx, i); err != nil {
			return err
		}
		if w.stage != nil {
			drafts[i] = w.stage.Stage(ctx, drafts[i], &w.clock.write)
		}
		if c := files[i].Content; c != nil {
			out[i].size, err = c.Bytes, c.Fill(ctx, drafts[i].Write)
		} else {
			out[i], err = w.target.At(files[i].Path).format.write(ctx, &w.session, drafts[i], share, &files[i])
		}
		if err != nil || w.stage != nil {
			return err
		}
		return drafts[i].Finish(out[i].size)
	})
	if err != nil || w.stage == nil {
		return out, err
	}
	rep.Staged = time.Since(w.start).Seconds()
	if w.spec.Staging.Done != nil {
		w.spec.Staging.Done()
	}
	passed := w.restartProgress(rep.BytesIn)
	return out, each(func(i int, share writerShare) error {
		d := drafts[i].(*publish.StagedDraft)
		if err := d.Flush(ctx, share.threads, passed); err != nil {
			return err
		}
		return d.Finish(out[i].size)
	})
}

// divideWriters decides how many of n files are written in parallel, and divides threads and slots among the writers.
func (w *Writer) divideWriters(n int) []writerShare {
	n = min(n, mostWriters)
	if len(w.gpus.all) == 0 {
		n = min(n, max(1, w.threads/leastThreads))
	}
	for _, g := range w.gpus.all {
		n = min(n, max(1, g.SlotCount()/leastFileSlots))
	}
	if w.target.Remote {
		n = 1 // an upload already uses several connections
	}
	all := make([]writerShare, n)
	for i := range all {
		all[i] = writerShare{i, n, max(1, (w.threads+n-1)/n)}
	}
	return all
}

// restartProgress sets the job's progress to zero and returns a function that adds n written bytes. The progress is
// scaled to bytes, the size of the tensors.
func (w *Writer) restartProgress(bytes int64) func(n int64) {
	w.job.Bytes.Store(0)
	all := max(1, w.stage.Taken())
	var done atomic.Int64
	return func(n int64) {
		w.job.Bytes.Store(int64(float64(min(done.Add(n), all)) / float64(all) * float64(bytes)))
	}
}

// takeStage takes memory for the stored bytes of all files, enough even if nothing can be compressed.
func (w *Writer) takeStage(files []File) (err error) {
	most, expected := int64(0), 0.0
	for i := range files {
		most += 1 << 20
		if c := files[i].Content; c != nil {
			most += c.Bytes
		}
		for _, t := range files[i].Items {
			pad := 4096 + 256*(t.bytes/w.spec.ChunkBytes+1)
			most += pad
			expected += float64(pad)
			if t.form != alias {
				most += t.bytes
				expected += float64(t.bytes) * t.expect
			}
		}
	}
	var on *cuda.Device
	if len(w.gpus.all) > 0 {
		on = w.gpus.all[0].on
	}
	w.stage, err = publish.TakeStaged(w.target.Path, most, int64(expected*1.01), w.spec.Staging.MaxMemory, on)
	return err
}

// A session is the state of one save that the writers of its files share.
type session struct {
	spec    *Spec
	job     *job.Job
	threads int
	clock   clock
	cores   chan struct{} // semaphore that limits how many batches the host encodes at a time
	gpus    gpuGroup
	stage   *publish.StagedMemory // nil if the save is not staged
	onGPU   atomic.Int64          // bytes that GPUs have encoded
}

// A writerShare is one of several writers that run in parallel, each on one file after another: its number, the number
// of writers, and its number of threads.
type writerShare struct {
	number, of int
	threads    int
}

// Stages holds the time of each stage of a save in nanoseconds, summed over its threads.
type Stages struct {
	PlanNS    int64 `json:"plan_ns"`    // choosing how tensors are stored, and allocating memory
	ReadNS    int64 `json:"read_ns"`    // reading from files, or copying from a GPU
	EncodeNS  int64 `json:"encode_ns"`  // encoding on the host, or waiting for a GPU to encode
	HashNS    int64 `json:"hash_ns"`    // computing checksums and hashes on the host
	WriteNS   int64 `json:"write_ns"`   // writing to stores, to staged memory, or to files, including syncs
	PublishNS int64 `json:"publish_ns"` // giving the files their names
}

// InSeconds lists the stages in seconds.
func (s Stages) InSeconds() string {
	return fmt.Sprintf("plan %.2f, read %.2f, encode %.2f, hash %.2f, write %.2f, publish %.2f",
		secondsOf(s.PlanNS), secondsOf(s.ReadNS), secondsOf(s.EncodeNS), secondsOf(s.HashNS), secondsOf(s.WriteNS),
		secondsOf(s.PublishNS))
}

// A clock adds up Stages.
type clock struct{ plan, read, encode, hash, write, publish atomic.Int64 }

func (c *clock) listStages() Stages {
	return Stages{PlanNS: c.plan.Load(), ReadNS: c.read.Load(), EncodeNS: c.encode.Load(), HashNS: c.hash.Load(),
		WriteNS: c.write.Load(), PublishNS: c.publish.Load()}
}

func (s *Stages) addStages(o Stages) {
	s.PlanNS += o.PlanNS
	s.ReadNS += o.ReadNS
	s.EncodeNS += o.EncodeNS
	s.HashNS += o.HashNS
	s.WriteNS += o.WriteNS
	s.PublishNS += o.PublishNS
}

func secondsOf(ns int64) float64 { return float64(ns) / 1e9 }

// addLap adds the time since start to a stage, and returns the current time.
func addLap(stage *atomic.Int64, start time.Time) time.Time {
	now := time.Now()
	stage.Add(int64(now.Sub(start)))
	return now
}

// A File is one file that a save writes. It contains either Items or the Content of publish.File.
type File struct {
	publish.File
	Metadata map[string]string
	Items    []*Item
	Original *original.File // the plain file with exactly these tensors and metadata, if known
}

// estimate sets the sizes that the publication needs.
func (f *File) estimate() {
	f.Most = 256 << 20 // maximum size of header and index
	if f.Content != nil {
		f.Expected = float64(f.Content.Bytes)
		f.Most += f.Content.Bytes
	}
	for _, t := range f.Items {
		switch t.form {
		case plain:
			f.Expected += float64(t.bytes)
		case compressed:
			f.Expected += float64(t.bytes) * t.expect * 0.97
		}
		f.Most += t.bytes + t.bytes/128 + 8192 // data may be aligned to a page
	}
}

// divideShards divides tensors, in the given order, into files of at most `most` bytes (0 means no limit). An alias is
// in the same file as its bytes.
func divideShards(path string, most int64, metadata map[string]string, items []*Item) []File {
	if most == 0 {
		return []File{{File: publish.File{Path: path}, Metadata: metadata, Items: items}}
	}
	in := map[*Item]int{} // the shard of each tensor, except aliases
	n, size := 1, int64(0)
	for _, t := range items {
		if t.form == alias {
			continue
		}
		if size > 0 && t.bytes > most-size {
			n, size = n+1, 0
		}
		in[t] = n - 1
		size += t.bytes
	}
	files := make([]File, n)
	for k := range files {
		files[k].Metadata = metadata
	}
	for _, t := range items {
		k := in[t]
		if t.form == alias {
			k = in[t.of]
		}
		files[k].Items = append(files[k].Items, t)
	}
	return NameFiles(path, files)
}

// NameFiles names the files of a model. A single file gets the path; several get shard names, and an index is added.
func NameFiles(path string, files []File) []File {
	if len(files) == 1 {
		files[0].Path = path
		return files
	}
	dir, stem := publish.SplitStem(path)
	for k := range files {
		files[k].Path = publish.JoinName(dir, fmt.Sprintf("%s-%05d-of-%05d%s", stem, k+1, len(files),
			publish.Extension))
	}
	return AddIndex(publish.IndexPath(path), files)
}

// AddIndex adds an index.json that lists files as its shards.
func AddIndex(path string, files []File) []File {
	s := &safetensors.Shards{}
	for k := range files {
		f := &files[k]
		f.Shard = true
		s.Files = append(s.Files, filepath.Base(f.Path))
		for _, t := range f.Items {
			s.TotalSize += t.bytes
			s.Weights = append(s.Weights, safetensors.Weight{Name: t.name, File: k})
		}
		if f.Content != nil {
			s.TotalSize += f.Content.Tensors
			for _, name := range f.Content.Names {
				s.Weights = append(s.Weights, safetensors.Weight{Name: name, File: k})
			}
		}
	}
	return append(files, File{File: publish.IndexOf(path, s)})
}
