// Package load opens a model and loads its tensors, or slices of them, into memory.
package load

import (
	"cmp"
	"context"
	"errors"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/hoststore"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/memory"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/unpack"
)

// A Spec describes what to open.
type Spec struct {
	// URIs are files, folders or index.json files; a model may be one file or many shards.
	URIs []string `json:"uris"`
	// Map decides whether plain tensors in files are mapped instead of read. nil means that they are mapped, except on
	// network file systems.
	Map *bool `json:"map"`
	// Lenient accepts headers that only other safetensors parsers accept.
	Lenient bool `json:"lenient"`
	// Parts also accepts files that contain parts of tensors.
	Parts bool `json:"parts"`
	// Storage describes how to reach remote files.
	Storage format.Access `json:"storage"`
	// Opened is the model's only source if it is already open. The model closes it.
	Opened source.Source `json:"-"`
	// Keys are the tensor names that will be requested; nil means all. If the model has an index.json, only shards that
	// contain at least one of these tensors are opened.
	Keys []string `json:"keys"`
	// Host decides whether local files come from the host store; nil means that OVERWIRE_HOST decides.
	Host *bool `json:"host"`
}

// A Model is an opened model. Its index is in memory and its sources are open. It is safe for concurrent use.
type Model struct {
	ix   *tensor.Index // as loads see it; see package unpack
	held *tensor.Index // as it is stored
	srcs []source.Source
	mapp string // a value of OVERWIRE_MMAP
	key  string // format.Access.Key of the spec
	host *hoststore.Link
	// The models that own the sources. This model holds them. nil means that this model owns its sources.
	parts []*Model
	// The times when Open began and ended, for traces.
	opened [2]time.Time

	mu   sync.Mutex
	refs int // 1 for the handle plus 1 for each running load
	shut bool

	mappings []fileMapping // indexed by source; nil if the model maps nothing

	preloaded []attached // indexed by file: the preloaded tensors; nil means none

	pinning bool    // Pin is running: no load may start
	pin     *pinned // nil if not pinned
}

// headers caches the headers of recently opened files.
var headers format.Cache

// Open opens and indexes a model, and validates all headers.
func Open(ctx context.Context, spec Spec) (*Model, error) {
	began := time.Now()
	m := &Model{mapp: knob.MMap.Get(), key: spec.Storage.Key(), refs: 1, host: hoststore.NewLink(spec.Host)}
	defer m.host.Done()
	if spec.Map != nil {
		m.mapp = map[bool]string{true: "on", false: "off"}[*spec.Map]
	}
	stores := open.With(spec.Storage.Options)
	opener := m.host.Open(stores.OpenLike)
	if spec.Opened != nil {
		opener = func(context.Context, string, source.Outline) (source.Source, error) { return spec.Opened, nil }
	}
	ix, srcs, _, err := format.OpenAll(ctx, spec.URIs, opener, format.Options{
		Lenient: spec.Lenient, Parts: spec.Parts, Keys: spec.Keys, Known: codec.Known, Cache: &headers,
		List: stores.List, Settings: spec.Storage.Decrypt,
	})
	if err != nil {
		return nil, err
	}
	m.held = ix
	m.ix, m.srcs = unpack.Model(ix, srcs)
	m.mappings = make([]fileMapping, len(m.srcs))
	m.opened = [2]time.Time{began, time.Now()}
	return m, nil
}

// IsBrief reports whether opening takes less time than waking another thread. That is the case for a single, small,
// unencrypted local file on a file system that does not make the caller wait, without the host store.
func IsBrief(spec *Spec) bool {
	uris := spec.URIs
	return len(uris) == 1 && len(spec.Storage.Decrypt) == 0 && hoststore.NewLink(spec.Host) == nil &&
		!strings.Contains(uris[0], "://") &&
		!strings.HasSuffix(uris[0], ".json") && regular.IsQuick(uris[0], plan.StepPiece)
}

// FromHost returns how many files of the model are in the host store's memory.
func (m *Model) FromHost() int { return m.host.Held() }

// Distrust drops the model's files from the host store if err means that their bytes were wrong.
func (m *Model) Distrust(err error) {
	if errors.Is(err, errs.ErrCorrupt) {
		m.host.Distrust(spawn.Context())
	}
}

// Of makes a model from a validated index and its sources. link is nil if no source is from the host store.
func Of(ix *tensor.Index, srcs []source.Source, link *hoststore.Link) *Model {
	m := &Model{held: ix, mapp: "off", refs: 1, host: link}
	m.ix, m.srcs = unpack.Model(ix, srcs)
	return m
}

// Names returns the tensor names that index.json files list, without opening a shard. ok is false if some of the files
// have no index.
func Names(ctx context.Context, spec Spec) (names []string, ok bool, err error) {
	stores := open.With(spec.Storage.Options)
	return format.Names(ctx, spec.URIs, stores.OpenLike, format.Options{List: stores.List})
}

// Index returns the model's index as it is stored.
func (m *Model) Index() *tensor.Index { return m.held }

// Seen returns the model's index as loads see it; see package unpack.
func (m *Model) Seen() *tensor.Index { return m.ix }

// Sources returns the model's sources. The caller must hold the model while using them.
func (m *Model) Sources() []source.Source { return m.srcs }

// FileStates returns a State for each file of the model. It reads nothing except samples.
func (m *Model) FileStates(ctx context.Context, samples bool) ([]State, error) {
	if samples {
		if err := m.Hold(); err != nil {
			return nil, m.LocateError("open", err)
		}
		defer m.Drop()
	}
	layouts := layoutDigests(m.held)
	states := make([]State, len(m.srcs))
	for i, s := range m.srcs {
		f := s.Facts()
		id := f.Identity
		states[i] = State{
			Device: id.Device, Inode: id.Inode, Size: m.held.Sources[i].Size, Modified: id.Modified,
			Changed: id.Changed, Pin: id.Pin, Network: f.Remote && f.File != nil, Layout: layouts[i],
			Sealed: m.held.Sources[i].Overwire(),
		}
		if samples && !states[i].Sealed && id.Pin == "" {
			var err error
			if states[i].Sample, err = sampleDigest(ctx, m.held, i, s, &states[i]); err != nil {
				return nil, err
			}
		}
	}
	return states, nil
}

// FileIdentities returns the identities of the model's files at the time they were opened. known is false if a file has
// no identity. settled is false if a file may have changed without a new identity.
func (m *Model) FileIdentities() (ids []source.Identity, settled, known bool) {
	settled, known = true, true
	for _, s := range m.srcs {
		f := s.Facts()
		ids, settled, known = append(ids, f.Identity), settled && f.Settled, known && f.Identity.Known()
	}
	return ids, settled, known
}

// Reached returns format.Access.Key of the spec that opened the model.
func (m *Model) Reached() string { return m.key }

// Close closes the handle. Running loads continue, and the sources are closed after the
// last load. Close may be called more than once.
func (m *Model) Close() {
	m.mu.Lock()
	again := m.shut
	m.shut = true
	m.mu.Unlock()
	if !again {
		m.Drop()
	}
}

// LocateError adds the URI of the model's first source to an error that does not concern a single tensor.
func (m *Model) LocateError(verb string, err error) error {
	at := &errs.At{Verb: verb, Chunk: -1, Offset: -1, Err: err}
	if len(m.ix.Sources) > 0 {
		at.Source = m.ix.Sources[0].URI
	}
	return at
}

// Hold keeps the sources open until Drop. It fails if the model is closed or being pinned.
func (m *Model) Hold() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.shut {
		return errs.New(errs.ErrArgument, "the model is closed")
	}
	if m.pinning {
		return errs.New(errs.ErrArgument, "the model is being pinned")
	}
	m.refs++
	m.host.NoteRead()
	return nil
}

// Drop undoes Hold.
func (m *Model) Drop() {
	m.mu.Lock()
	m.refs--
	last := m.refs == 0
	m.mu.Unlock()
	if last {
		m.detachPreloaded()
		for _, one := range m.parts {
			one.Drop()
		}
		if m.parts == nil {
			for _, s := range m.srcs {
				_ = s.Close()
			}
		}
		for i := range m.mappings {
			device.Memory{Block: m.mappings[i].block}.Release()
		}
	}
}

// Uncut returns an error if a file was truncated or written to after it was opened, because the bytes read or mapped
// may mix old and new contents. Reading a mapping of a truncated file may also give zeros without an error.
func (m *Model) Uncut() error {
	for _, s := range m.srcs {
		err := source.Unwritten(s)
		if err != nil && s.Facts().File != nil {
			if cut := withFD(s, func(fd int) error { return cpu.StillHas(fd, s.Size()) }); cut != nil {
				return cut
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// maps reports whether plain tensors of a source are mapped. Files on a network file system are mapped only on request:
// reading them page by page is slow, and a failing server would kill the process.
func (m *Model) maps(s source.Source) bool {
	f := s.Facts()
	return f.File != nil && (m.mapp == "on" || m.mapp == "auto" && !f.Remote)
}

// mapped reports for each source whether a load to the host maps its plain tensors.
func (m *Model) mapped() []bool {
	maps := make([]bool, len(m.srcs))
	for i, s := range m.srcs {
		maps[i] = m.maps(s)
	}
	return maps
}

// inFile reports whether a want can be mapped from its file. maps is the result of mapped.
func (m *Model) inFile(w *plan.Want, maps []bool) bool {
	t := &m.ix.Tensors[w.Data]
	off, row := w.SourceRange(m.ix)
	return row && maps[t.Source] && !m.ix.Sources[t.Source].Overwire() && off%int64(t.DType.Align()) == 0
}

// Attach lets loads of the model take the preloaded tensors of its file i until the model is closed. The file has the
// number `file` in s. id is the file's identity when preloading began. If the model's file has a different identity, or
// was written to later, Attach does nothing and returns false.
func (m *Model) Attach(i int, s *Preloaded, file int, id source.Identity) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.shut || m.pin != nil || m.pinning {
		return false
	}
	if m.preloaded == nil {
		m.preloaded = make([]attached, len(m.srcs))
	}
	if m.preloaded[i].preloaded != nil {
		return m.preloaded[i].preloaded == s
	}
	if !m.srcs[i].Facts().Unchanged(id) || !s.useFile(file, 1) {
		return false
	}
	m.preloaded[i] = attached{s, file, id}
	return true
}

// MapsAs reports whether plain tensors of file i of this model and of file k of the other model are either all mapped
// or all read.
func (m *Model) MapsAs(i int, other *Model, k int) bool {
	return m.ix.Sources[i].Overwire() || m.maps(m.srcs[i]) == other.maps(other.srcs[k])
}

// detachPreloaded undoes Attach when the model is closed.
func (m *Model) detachPreloaded() {
	for _, j := range m.preloaded {
		if j.preloaded != nil {
			j.preloaded.useFile(j.file, -1)
		}
	}
}

// Machine describes the machine and the model's sources for the planner. gpu means that the load goes to a GPU. stepped
// means that ranges may be read in steps.
func (m *Model) Machine(gpu bool, threads int, stepped bool) plan.Machine {
	mc := plan.Machine{Cores: runtime.GOMAXPROCS(0), Threads: cmp.Or(max(0, threads), max(0, knob.Threads.Get()))}
	for _, s := range m.srcs {
		f := s.Facts()
		mc.Concurrency = max(mc.Concurrency, f.Concurrency)
		mc.DirectIO = mc.DirectIO || f.File != nil
		stepped = stepped && f.Ranges != nil
		mc.RangeBytes = max(mc.RangeBytes, f.RangeBytes)
	}
	if !stepped {
		mc.RangeBytes = 0
	}
	if gpu {
		_, mc.SlotBytes = Ring(mc)
	}
	return mc
}

// Start checks the requests, allocates their memory and starts to load. If reqs is nil, it loads every tensor.
// Destinations in requests must stay valid until the job has ended.
func (m *Model) Start(reqs []Request, opt Options) (*Loading, error) {
	if reqs == nil {
		reqs = make([]Request, len(m.ix.Tensors))
		for i := range reqs {
			reqs[i] = Request{Tensor: int64(i), Hi0: plan.Whole, Hi1: plan.Whole}
		}
	}
	wants, err := plan.Check(m.ix, reqs)
	if err != nil {
		return nil, err
	}
	tgt, err := TargetOf(opt.Device)
	if err != nil {
		return nil, m.LocateError("open", err)
	}
	tgt.inPlace = opt.InPlace
	if err := knob.Read.Check(opt.Read); err != nil {
		return nil, errs.New(errs.ErrArgument, "read %q: %v", opt.Read, err)
	}
	if all := servedByPreloaded(m, reqs, wants, tgt, opt); all != nil {
		return startFromPreloaded(m, reqs, wants, tgt, opt, all)
	}
	return m.startRequests(reqs, wants, tgt, opt)
}

// startRequests is like Start, but does not use preloaded tensors.
func (m *Model) startRequests(reqs []Request, wants []plan.Want, tgt Target, opt Options) (_ *Loading, err error) {
	if err := m.Hold(); err != nil {
		return nil, err
	}
	l := newLoading(m, tgt, wants)
	defer func() {
		if err != nil {
			cpu.Release(l.out.mem)
			m.Drop()
		}
	}()
	if l.casts, err = castsOf(m.ix, wants, tgt, opt.Cast); err != nil {
		return nil, err
	}
	if err = l.allocateRequests(reqs); err != nil {
		return nil, err
	}
	// Allocate here and not in the job, so the caller can free memory and try again if there is not enough.
	l.machine = m.Machine(tgt.GPU != nil, opt.Threads, true)
	if opt.After == nil && !l.bindsMeanwhile() {
		if l.queue.queue, err = tgt.Queue(0, l.machine); err != nil {
			return nil, m.LocateError("stage", err)
		}
	}
	begin := l.job.Go
	if opt.After == nil && l.isShort() {
		begin = l.job.RunHere
	}
	begin(func(ctx context.Context, j *job.Job) error {
		defer l.afterWorkers()
		err := runLoad(ctx, j, l, reqs, opt)
		m.Distrust(err)
		return err
	})
	return l, nil
}

// LoadWhole loads whole tensors by number and returns the memory of each. nil loads all tensors. The caller releases
// the memory.
func (m *Model) LoadWhole(ctx context.Context, tensors []int, opt Options) ([]device.Memory, error) {
	var reqs []Request
	for _, i := range tensors {
		reqs = append(reqs, Request{Tensor: int64(i), Hi0: plan.Whole, Hi1: plan.Whole})
	}
	l, err := m.Start(reqs, opt)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	if err := l.AwaitEnd(ctx); err != nil {
		return nil, err
	}
	mem := make([]device.Memory, l.Len())
	for k := range mem {
		var ok bool
		if mem[k], _, _, ok = l.Take(k); !ok {
			cpu.Release(mem)
			return nil, errs.New(errs.ErrEngine, "request %d of %d was not loaded", k, l.Len())
		}
	}
	return mem, nil
}

// Pin reads the files of a model, as they are stored, into host memory, verifies every checksum, and closes the files.
// Later loads read nothing: a GPU copies directly from this memory. The memory is registered with the driver for
// opt.Device, or else by the first load to a GPU. It is freed after Close and the last load.
//
// The job counts the bytes of the files. No load of the model may be running, and none may start before the job has
// ended. If the job fails, the model is unchanged.
func (m *Model) Pin(opt Options) (*job.Job, error) {
	tgt, err := TargetOf(opt.Device)
	if err != nil {
		return nil, m.LocateError("open", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.shut:
		return nil, errs.New(errs.ErrArgument, "the model is closed")
	case m.pinning || m.pin != nil:
		return nil, errs.New(errs.ErrArgument, "the model is already pinned or being pinned")
	case m.refs != 1:
		return nil, errs.New(errs.ErrArgument, "loads of the model are running: wait for them before you pin it")
	}
	m.pinning = true
	m.host.NoteRead()
	m.refs++
	return job.Start("pin", func(ctx context.Context, j *job.Job) error {
		defer m.Drop()
		start := time.Now()
		p := &pinned{}
		err := p.readAll(ctx, j, m, opt.Threads)
		if err == nil && tgt.GPU != nil {
			err = p.register(m, tgt.GPU)
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		m.pinning = false
		if err != nil {
			for i := range p.bytes {
				p.freeSource(i)
			}
			return err
		}
		m.pin = p
		for i, b := range p.bytes {
			_ = m.srcs[i].Close()
			m.srcs[i] = unpack.Over(m.srcs[i], memory.New(m.ix.Sources[i].URI, b, func() { p.freeSource(i) }))
		}
		j.SetReport(PinReport{j.TotalBytes.Load(), time.Since(start).Seconds()})
		return nil
	}), nil
}

// Several combines open models into one, which uses their open files. It numbers the tensors and sources of all models
// consecutively, so tensors with the same name have different numbers. It does not use preloaded tensors. The models'
// files stay open until the combined model is closed and its loads have ended.
func Several(models []*Model) (_ *Model, err error) {
	m := &Model{mapp: "off", refs: 1}
	defer func() {
		if err != nil {
			m.Close()
		}
	}()
	var seen, held []*tensor.Index
	for _, one := range models {
		if err := one.Hold(); err != nil {
			return nil, one.LocateError("open", err)
		}
		m.parts = append(m.parts, one)
		m.srcs = append(m.srcs, one.srcs...)
		seen, held = append(seen, one.ix), append(held, one.held)
	}
	if m.ix, err = format.Join(seen); err == nil {
		m.held, err = format.Join(held)
	}
	return m, err
}

// ViewOf returns m with another index, for srcs that read from the sources of m. The files of m stay open until the
// view is closed and its loads have ended. The view does not use preloaded tensors.
func ViewOf(m *Model, ix *tensor.Index, srcs []source.Source) (*Model, error) {
	if err := m.Hold(); err != nil {
		return nil, m.LocateError("open", err)
	}
	return &Model{ix: ix, held: ix, srcs: srcs, mapp: "off", refs: 1, host: m.host, parts: []*Model{m}}, nil
}
