package binding

// This file defines the verbs that read and write files, control jobs, and control the engine.

import (
	"context"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/bench"
	"github.com/overwire/overwire/gosrc/cli"
	"github.com/overwire/overwire/gosrc/convert"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/pinned"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/fetch"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/sleep"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/cache"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/verify"
)

type saveRequest struct {
	save.Spec
	columns
	// Places maps the name of each tensor in several pieces to the address and size of each piece.
	Places map[string][]int64 `json:"places,omitempty"`
	// Background allows the tensors to change after Next has returned, before the job ends.
	Background bool `json:"background,omitempty"`
	// MaxMemory limits the host memory of stored bytes for Background. 0 means all free memory.
	MaxMemory int64 `json:"max_memory,omitempty"`

	brief bool
}

func (q saveRequest) isBrief() bool { return q.brief }

type sleepRequest struct {
	sleep.Spec
	Keep bool `json:"keep"` // put the tensors into the host store instead
	columns
}

type prepareRequest struct {
	sleepRequest
	Bytes int64 `json:"bytes"` // host memory without tensors
}

// prepared is the expected host memory of a sleep.
type prepared struct {
	Bytes int64 `json:"bytes"`
}

// putRequest describes bytes that become a file or object.
type putRequest struct {
	Path    string        `json:"path"`
	Stale   []string      `json:"stale"` // URIs to remove after the write
	Once    bool          `json:"once"`  // use open.PutOnce and ignore stale
	Storage format.Access `json:"storage"`
}

type removeRequest struct {
	URIs    []string      `json:"uris"`
	Storage format.Access `json:"storage"`
}

type renameRequest struct {
	Made string `json:"made"`
	Path string `json:"path"`
}

type renameFolderRequest struct {
	renameRequest
	Exchange bool `json:"exchange"`
}

type convertRequest struct {
	URIs []string `json:"uris"`
	save.Spec
}

func (q saveRequest) replacedPath() string    { return q.Path }
func (q sleepRequest) replacedPath() string   { return q.Path }
func (q putRequest) replacedPath() string     { return q.Path }
func (q renameRequest) replacedPath() string  { return q.Path }
func (q convertRequest) replacedPath() string { return q.Path }

type filesRequest struct {
	URIs    []string      `json:"uris"`
	Storage format.Access `json:"storage"`
	copies
}

// copies describes the plain copies among the URIs.
type copies struct {
	Copies verify.Copies `json:"copies"`
}

type verifyRequest struct {
	URIs     []string      `json:"uris"`
	Storage  format.Access `json:"storage"`
	Original bool          `json:"original"`
	copies
}

type fetchRequest struct {
	fetch.Spec
	FD uintptr `json:"fd"` // descriptor of an open file, which is duplicated
}

type besideRequest struct {
	URI   string   `json:"uri"`
	Names []string `json:"names"`
}

type besides struct {
	Name string   `json:"name"`
	Path string   `json:"path"` // has no query and no hf:// revision
	URIs []string `json:"uris"`
}

type occupiedRequest struct {
	URI     string        `json:"uri"`
	Storage format.Access `json:"storage"`
}

type presignRequest struct {
	URI     string        `json:"uri"`
	Storage format.Access `json:"storage"`
	Seconds int           `json:"seconds"`
}

// program describes the Python process and its command line.
type program struct {
	Argv    []string       `json:"argv"`
	Python  string         `json:"python"`
	Version string         `json:"version"`
	Storage source.Options `json:"storage"` // environment variables for stores
	// Secrets are the values of environment variables that the command line names.
	Secrets map[string]string `json:"secrets"`
	// Names maps paths to the names that messages use for them.
	Names map[string]string `json:"names"`
	copies
	Measure bool `json:"measure"` // only used by doctor
}

func (p program) env() cli.Env {
	return cli.Env{Python: p.Python, PythonVersion: p.Version, Storage: p.Storage, Secrets: p.Secrets}
}

// nameVerbs returns the verbs that write, rename and remove complete files and objects.
func nameVerbs() []*Verb {
	return []*Verb{
		started("put", "Replace a file or object with bytes, which must not change until the job has ended.", put).
			ints("address", "nbytes").onCallersMemory(),
		started("remove", "Remove objects from stores. Missing objects are not an error.", removeObjects),
		started("rename", "Rename a complete file to replace another file in its folder.",
			func(_ context.Context, _ *job.Job, q renameRequest, _ []int64) (save.Report, error) {
				return save.Report{}, atomicfile.Rename(q.Made, q.Path)
			}),
		answered("rename_folder", "Rename a folder to a free name, or exchange it with another folder, atomically.",
			func(q renameFolderRequest, _ []int64) (none, error) {
				return none{}, atomicfile.RenameFolder(q.Made, q.Path, q.Exchange)
			}),
		started("sync_names", "Wait until the folder of a path has been written to disk.",
			func(_ context.Context, _ *job.Job, path string, _ []int64) (none, error) {
				return none{}, atomicfile.Failed(path, -1, atomicfile.Disk{}.SyncNames(path))
			}).awaited(),
		answered("follow", "Resolve a path to write to. Links of other users are refused.",
			func(path string, _ []int64) (string, error) {
				place, err := atomicfile.Follow(path)
				if err != nil {
					return "", atomicfile.Failed(path, -1, err)
				}
				return place.Path, nil
			}),
		answered("refuse_planted", "Refuse a path if another user could have created a part of it.",
			func(path string, _ []int64) (none, error) {
				return none{}, errs.In("save", path, regular.RefusePlanted(path))
			}),
	}
}

func fileVerbs() []*Verb {
	return []*Verb{
		begun[saveRequest, save.Report]("save", "Write tensors, which must not change until the job ends.", startSave).
			tail("for each tensor its address, size, and 1 + its GPU (0 for the host)").
			onCallersMemory(),
		answered("plain_front",
			"Return a plain file's header without its length, and the order of the tensors, which must be on the host.",
			func(q saveRequest, n []int64) (save.Front, error) {
				in, err := inputs(&q, n)
				if err != nil {
					return save.Front{}, err
				}
				return save.FrontOf(q.Path, q.Metadata, in)
			}).tail("for each tensor its address, its size, and 0"),
		begun[prepareRequest, prepared]("sleep_prepare",
			"Allocate host memory for a sleep of one device's tensors, which are read before this returns.",
			startPrepare).
			tail("for each tensor its address and size"),
		answered("sleep_return", "Free the host memory that is cached for sleeps of a device.",
			func(device Text, _ []int64) (none, error) { return none{}, sleep.Return(string(device)) }),
		begun[sleepRequest, sleep.Report]("sleep",
			"Compress one device's tensors to host memory, as a model. They must not change until the job has ended.",
			startSleep).tail("for each tensor its address and size").onCallersMemory(),
		started("convert", "Rewrite files.",
			func(ctx context.Context, j *job.Job, q convertRequest, _ []int64) (save.Report, error) {
				return convert.Convert(ctx, j, q.URIs, q.Path, q.Spec)
			}),
		started("verify", "Verify all checksums of files.",
			func(ctx context.Context, j *job.Job, q verifyRequest, _ []int64) (verify.Report, error) {
				rep, err := verify.Verify(ctx, j, q.URIs, q.Storage, q.Original)
				rep.DescribeOriginals(q.Copies)
				return rep, err
			}),
		begun[fetchRequest, fetch.Report]("fetch", "Write the bytes of URIs to an open file.", startFetch),
		started("inspect", "Describe files from their headers.",
			func(ctx context.Context, _ *job.Job, q filesRequest, _ []int64) (any, error) {
				in, err := verify.Inspect(ctx, q.URIs, q.Storage)
				if err == nil {
					in.DescribeOriginals(q.Copies)
				}
				return in, err
			}).awaited(),
		answered("shown", "Return a URI without credentials, for messages.",
			func(uri string, _ []int64) (string, error) { return errs.RedactURI(uri), nil }),
		answered("notices", "Return new messages about how files in stores were opened. Each message is returned once.",
			func(none, []int64) ([]string, error) { return append([]string{}, source.Notices()...), nil }),
		answered("cache_counts", "Return the counters of the caches of remote objects in this process.",
			func(none, []int64) (cache.Counts, error) { return cache.CountedObjects(), nil }).afterPanics(),
		answered("beside", "Return the file name in a URI, and the URIs of other names in the same folder.",
			func(q besideRequest, _ []int64) (besides, error) {
				b := besides{Name: source.Name(q.URI), Path: source.Path(q.URI), URIs: []string{}}
				for _, name := range q.Names {
					b.URIs = append(b.URIs, source.Beside(q.URI, name))
				}
				return b, nil
			}),
		started("occupied", "Return what exists at a path to be written: a file, a folder with files, or nothing.",
			func(ctx context.Context, _ *job.Job, q occupiedRequest, _ []int64) (open.Occupant, error) {
				return open.Occupied(ctx, q.URI, q.Storage.Options)
			}).awaited(),
		started("presign",
			"Return a secret URL with which an S3 object can be read without credentials for some seconds.",
			func(ctx context.Context, _ *job.Job, q presignRequest, _ []int64) (string, error) {
				return open.Presign(ctx, q.URI, q.Storage.Options, time.Duration(q.Seconds)*time.Second)
			}).awaited(),
	}
}

func programVerbs() []*Verb {
	return []*Verb{
		started("read_floor", "Read bytes [begin, end) of a file to a GPU (-1 means the host) through pinned slots.",
			func(ctx context.Context, _ *job.Job, path Text, n []int64) (none, error) {
				r := bench.Reading{Path: string(path), Lo: n[0], Hi: n[1], GPU: int(n[2]), To: uint64(n[3]),
					Slots: uint64(n[4]), Threads: int(n[5])}
				return none{}, r.Run(ctx)
			}).awaited().ints("begin", "end", "device", "to", "slots", "threads").onCallersMemory(),
		started("doctor", "Describe the machine. With `measure`, also measure the links of its GPUs.",
			func(_ context.Context, _ *job.Job, q program, _ []int64) (any, error) {
				return cli.Diagnose(q.env(), q.Measure), nil
			}).awaited(),
		started("cli", "Run a command line. The job's report is the exit status.",
			func(ctx context.Context, j *job.Job, q program, _ []int64) (int, error) {
				for path, name := range q.Names {
					errs.CallPath(path, name)
				}
				env := q.env()
				env.Copies = q.Copies
				return cli.Main(ctx, j, q.Argv, os.Stdout, os.Stderr, env), nil
			}),
		answered("knobs", "Return the settings with their current values.",
			func(none, []int64) ([]knob.Row, error) { return knob.Table(), nil }),
	}
}

func startSave(v *Verb, q saveRequest, n []int64) (*entry, error) {
	in, err := inputs(&q, n)
	if err != nil {
		return nil, err
	}
	var stagingEnd chan struct{}
	if q.Background {
		stagingEnd = make(chan struct{})
		q.Staging = &save.Staging{Done: func() { close(stagingEnd) }, MaxMemory: q.MaxMemory}
	}
	q.brief = q.IsBrief(in)
	e := v.background(q, func(ctx context.Context, j *job.Job) (any, error) {
		return save.Write(ctx, j, q.Spec, in)
	})
	e.staged = stagingEnd
	return e, nil
}

// inputs returns the tensors of a request. Tensors on a GPU are copied from the GPU.
func inputs(q *saveRequest, n []int64) ([]save.Input, error) {
	types, err := q.named(len(n), 3)
	if err != nil {
		return nil, err
	}
	in := make([]save.Input, len(q.Names))
	for i, name := range q.Names {
		address, nbytes, gpu := n[3*i], n[3*i+1], int(n[3*i+2])-1
		in[i] = save.Input{Name: name, DType: types[i], Shape: q.Shapes[i]}
		if places := q.Places[name]; len(places) > 0 {
			if in[i].Pieces, err = piecesAt(name, places); err != nil {
				return nil, err
			}
			continue
		}
		data, err := dataAt(uint64(address), nbytes)
		switch {
		case err != nil:
			return nil, &errs.At{Verb: "save", Tensor: name, Chunk: -1, Offset: -1, Err: err}
		case gpu < 0 || nbytes == 0:
			in[i].Data = data
			continue
		}
		d0, err := cuda.Open(gpu)
		if err != nil {
			return nil, err
		}
		base := unsafe.Pointer(unsafe.SliceData(data))
		in[i].Device = &save.DeviceMemory{Addr: uintptr(base), Bytes: nbytes, GPU: d0,
			Read: func(dst []byte, off int64) error {
				return d0.Read(dst, device.Memory{Ptr: unsafe.Add(base, off), Bytes: int64(len(dst))})
			}}
	}
	return in, nil
}

// piecesAt returns the memory of a tensor that is in several pieces.
func piecesAt(name string, places []int64) (all [][]byte, err error) {
	for k := 0; k+1 < len(places); k += 2 {
		piece, err := dataAt(uint64(places[k]), places[k+1])
		if err != nil {
			return nil, &errs.At{Verb: "save", Tensor: name, Chunk: -1, Offset: -1, Err: err}
		}
		all = append(all, piece)
	}
	return all, nil
}

func (q *sleepRequest) tensors(n []int64) ([]sleep.Tensor, error) {
	types, err := q.named(len(n), 2)
	if err != nil {
		return nil, err
	}
	in := make([]sleep.Tensor, len(q.Names))
	for i, name := range q.Names {
		data, err := dataAt(uint64(n[2*i]), n[2*i+1])
		if err != nil {
			return nil, &errs.At{Verb: "sleep", Tensor: name, Chunk: -1, Offset: -1, Err: err}
		}
		in[i] = sleep.Tensor{Name: name, DType: types[i], Shape: q.Shapes[i], Data: data}
	}
	return in, nil
}

// startPrepare reads the tensors before it returns, and not afterwards.
func startPrepare(v *Verb, q prepareRequest, n []int64) (*entry, error) {
	in, err := q.tensors(n)
	if err != nil {
		return nil, err
	}
	p, err := sleep.Prepare(q.Spec, q.Bytes, in)
	if err != nil {
		return nil, errs.Locate("sleep", "", "", -1, err)
	}
	e := v.background(nil, func(ctx context.Context, _ *job.Job) (any, error) {
		_, err := p.Wait(ctx)
		return prepared{p.Bytes}, err
	})
	e.job.SetReport(prepared{p.Bytes})
	return e, nil
}

func startSleep(v *Verb, q sleepRequest, n []int64) (*entry, error) {
	in, err := q.tensors(n)
	if err != nil {
		return nil, err
	}
	return v.background(q, func(ctx context.Context, j *job.Job) (any, error) {
		if q.Keep {
			return sleep.KeepOnHost(ctx, j, q.Spec, in)
		}
		m, rep, err := sleep.Sleep(ctx, j, q.Spec, in)
		if err != nil {
			return none{}, err
		}
		j.SetReport(rep)
		return &Result{Model: keep(m), Table: m.Index()}, nil
	}), nil
}

func put(ctx context.Context, j *job.Job, q putRequest, n []int64) (save.Report, error) {
	data, err := dataAt(uint64(n[0]), n[1])
	if err != nil {
		return save.Report{}, err
	}
	if !source.Remote(q.Path) {
		return save.Report{}, atomicfile.Write(ctx, q.Path, data)
	}
	failed := func(err error) { j.Failed(err, func() {}) } // does nothing: the bytes being sent are copies
	if q.Once {
		return save.Report{}, open.PutOnce(ctx, q.Path, q.Storage.Options, data, failed)
	}
	return save.Report{}, open.Put(ctx, q.Path, q.Storage.Options, data, q.Stale, failed)
}

func removeObjects(ctx context.Context, _ *job.Job, q removeRequest, _ []int64) (rep save.Report, first error) {
	for _, uri := range q.URIs {
		if err := open.Remove(ctx, uri, q.Storage.Options); first == nil {
			first = err
		}
	}
	return rep, first
}

func startFetch(v *Verb, q fetchRequest, _ []int64) (*entry, error) {
	own, err := unix.FcntlInt(q.FD, unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, errs.FromOS(err)
	}
	return v.background(q, func(ctx context.Context, j *job.Job) (any, error) {
		f := os.NewFile(uintptr(own), "fetch")
		defer f.Close()
		return fetch.Fetch(ctx, j, q.Spec, f)
	}), nil
}

// jobVerbs returns the verbs that control jobs and the engine.
func jobVerbs() []*Verb {
	return []*Verb{
		answered("progress",
			"Return the numbers of bytes and tensors that a job has processed, each with its total.", ofNumbered(jobOf,
				func(e *entry, _ none, _ []int64) (*Result, error) { return &Result{Numbers: e.progress()}, nil })).
			ints("job").afterPanics(),
		answered("report", "Return a job's report, or null if there is none yet.", ofNumbered(jobOf,
			func(e *entry, _ none, _ []int64) (*Result, error) {
				text, err := e.report()
				return &Result{Text: text}, err
			})).ints("job").afterPanics(),
		answered("cancel",
			"Cancel a job without waiting. The job may use the caller's memory until it has ended.", ofNumbered(jobOf,
				func(e *entry, _ none, _ []int64) (none, error) { e.cancel(); return none{}, nil })).
			ints("job").afterPanics(),
		answered("empty_cache", "Free cached device and pinned memory.",
			func(none, []int64) (none, error) { pinned.Trim(); return none{}, cuda.Trim() }),
		answered("quiesce", "Wait up to `ms` for running jobs. Then free all cached memory, and close the files and "+
			"connections that the engine keeps open. Return the running jobs, and what callers hold.", quiesceEngine).
			ints("ms"),
		answered("shutdown",
			"Cancel all jobs at exit and wait up to `ms` for them. Return 1 if they have ended, otherwise 0.",
			func(_ none, n []int64) (int64, error) {
				haveEnded := job.CancelAll(time.Duration(n[0]) * time.Millisecond)
				if haveEnded && spawn.Poisoned() == nil {
					load.AwaitPreparations()
					_ = cuda.Trim() // before the driver's exit handlers
				}
				return truth(haveEnded), nil
			}).ints("ms").afterPanics(),
	}
}
