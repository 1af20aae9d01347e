package face

import (
	"context"
	"encoding/binary"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/fetch"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/rawjson"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/preload"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/tensor"
)

var models = newTable[*load.Model]("model")

// parse reads a JSON text of Python's.
func parse[T any](what, text string) (v T, err error) {
	if err := rawjson.Unmarshal(text, &v); err != nil {
		return v, fault.New(fault.ErrArgument, "%s: %v", what, err)
	}
	return v, nil
}

// encode makes a JSON text for Python.
func encode(v any) (string, error) {
	b, err := rawjson.Marshal(v)
	if err != nil {
		return "", fault.New(fault.ErrEngine, "result: %v", err)
	}
	return string(b), nil
}

// Setup takes the environment as Python sees it, a JSON object, and returns
// warnings for people as a JSON list.
func Setup(env string) (string, error) {
	vars, err := parse[map[string]string]("environment", env)
	if err != nil {
		return "", err
	}
	warnings := knob.Load(vars)
	codec.Use(knob.CPU.Get())
	if warnings == nil {
		warnings = []string{}
	}
	return encode(warnings)
}

// Knobs returns the table of settings as JSON.
func Knobs() (string, error) { return encode(knob.Table()) }

// CloseModel ends a model; a handle that is not there is no mistake.
func CloseModel(h uint64) {
	if m, ok := models.take(h); ok {
		m.Close()
	}
}

// Index returns the index of an open model.
func Index(h uint64) (*tensor.Index, error) {
	m, err := models.get(h)
	if err != nil {
		return nil, err
	}
	return m.Index(), nil
}

// ModelInfo describes a model's sources as JSON.
func ModelInfo(h uint64) (string, error) {
	ix, err := Index(h)
	if err != nil {
		return "", err
	}
	type source struct {
		URI      string            `json:"uri"`
		Size     int64             `json:"size"`
		Metadata map[string]string `json:"metadata"`
		Overwire bool              `json:"overwire"`
	}
	info := struct {
		Sources []source `json:"sources"`
	}{make([]source, len(ix.Sources))}
	for i, s := range ix.Sources {
		info.Sources[i] = source{fault.Redact(s.URI), s.Size, s.Metadata, s.Overwire()}
	}
	return encode(info)
}

// ModelPin begins to pin a model; options are the JSON of load.Options.
func ModelPin(h uint64, options string) (uint64, error) {
	opt, err := parse[load.Options]("options", options)
	if err != nil {
		return 0, err
	}
	m, err := models.get(h)
	if err != nil {
		return 0, err
	}
	j, err := m.Pin(opt)
	if err != nil {
		return 0, err
	}
	return start(j), nil
}

// requestWords is how many int64 a packed request has, in the order of the
// fields of load.Request.
const requestWords = 6

// Requests unpacks what Python packed. The numbers are copied.
func Requests(packed []byte) ([]load.Request, error) {
	const size = requestWords * 8
	if len(packed)%size != 0 {
		return nil, fault.New(fault.ErrArgument, "requests: %d bytes are no whole number of requests", len(packed))
	}
	reqs := make([]load.Request, len(packed)/size)
	for i := range reqs {
		var w [requestWords]int64
		for k := range w {
			w[k] = int64(binary.LittleEndian.Uint64(packed[i*size+k*8:]))
		}
		reqs[i] = load.Request{Tensor: w[0], Dest: uintptr(w[1]), Lo0: w[2], Hi0: w[3], Lo1: w[4], Hi1: w[5]}
	}
	return reqs, nil
}

// LoadStart begins to load; nil asks for every tensor.
func LoadStart(h uint64, reqs []load.Request, options string) (uint64, error) {
	opt, err := parse[load.Options]("options", options)
	if err != nil {
		return 0, err
	}
	m, err := models.get(h)
	if err != nil {
		return 0, err
	}
	l, err := m.Start(reqs, opt)
	if err != nil {
		return 0, err
	}
	return jobs.put(&entry{job: l.Job(), load: l}), nil
}

// Input describes one tensor to be saved; data stays as it is until the save
// has ended.
func Input(name, dtype string, shape []int64, data unsafe.Pointer, n int64) (save.Input, error) {
	d, ok := tensor.ParseDType(dtype)
	if !ok {
		return save.Input{}, fault.New(fault.ErrArgument, "tensor %q: no such dtype: %q", name, dtype)
	}
	if n < 0 || n > 0 && data == nil {
		return save.Input{}, fault.New(fault.ErrArgument, "tensor %q: %d bytes at %p", name, n, data)
	}
	return save.Input{
		Name: name, DType: d, Shape: append([]int64(nil), shape...), Data: unsafe.Slice((*byte)(data), n),
	}, nil
}

// SaveStart begins to write tensors to what the JSON of a save.Spec names; see
// onGPUs for those that are not in host memory. With "raw" it writes the bytes
// of the one tensor as they are to a file, or to an object of a store, after which
// the URIs of "stale" are removed. With "made" it gives the path to that finished
// file of the same folder.
func SaveStart(spec string, in []save.Input) (uint64, error) {
	s, err := parse[save.Spec]("spec", spec)
	if err != nil {
		return 0, err
	}
	if s.Away, err = onGPUs(spec, in); err != nil {
		return 0, err
	}
	put, err := parse[struct {
		Raw   bool     `json:"raw"`
		Made  string   `json:"made"`
		Stale []string `json:"stale"`
	}]("spec", spec)
	if err != nil {
		return 0, err
	}
	if put.Raw {
		if len(in) != 1 {
			return 0, fault.New(fault.ErrArgument, "raw: one tensor of bytes was expected")
		}
		return start(job.Start("save", func(ctx context.Context, j *job.Job) error {
			defer preload.Sweep(s.Path)
			j.SetReport(save.Report{})
			if !source.Remote(s.Path) {
				return atomicfile.Write(s.Path, in[0].Data)
			}
			return open.Put(ctx, s.Path, s.Storage.Options, in[0].Data, put.Stale, j.Failed)
		})), nil
	}
	if put.Made != "" {
		return start(job.Start("save", func(context.Context, *job.Job) error {
			defer preload.Sweep(s.Path)
			return atomicfile.Rename(put.Made, s.Path)
		})), nil
	}
	return start(job.Start("save", func(ctx context.Context, j *job.Job) error {
		r, err := save.Write(ctx, j, s, in)
		j.SetReport(r)
		preload.Sweep(s.Path)
		return err
	})), nil
}

// onGPUs lets the tensors that lie on a GPU be fetched from there: "cuda" of the
// spec has for each tensor 1 + its device, 0 for the host, or is not there.
func onGPUs(spec string, in []save.Input) (map[int]*save.Away, error) {
	where, err := parse[struct {
		CUDA []int `json:"cuda"`
	}]("spec", spec)
	if err != nil || len(where.CUDA) == 0 {
		return nil, err
	}
	if len(where.CUDA) != len(in) {
		return nil, fault.New(fault.ErrArgument, "devices of %d tensors, and %d tensors", len(where.CUDA), len(in))
	}
	away := map[int]*save.Away{}
	for i, n := range where.CUDA {
		if n <= 0 || len(in[i].Data) == 0 {
			continue
		}
		gpu, err := cuda.Open(n - 1)
		if err != nil {
			return nil, err
		}
		base, bytes := unsafe.Pointer(unsafe.SliceData(in[i].Data)), int64(len(in[i].Data))
		in[i].Data = nil
		away[i] = &save.Away{Addr: uintptr(base), Bytes: bytes, Read: func(dst []byte, off int64) error {
			return gpu.Read(dst, device.Memory{Ptr: unsafe.Add(base, off), Bytes: int64(len(dst))})
		}}
	}
	return away, nil
}

// ConvertStart begins to rewrite the files "uris" of the JSON as what its
// other fields, those of save.Spec, describe.
func ConvertStart(spec string) (uint64, error) {
	from, err := parse[load.Spec]("spec", spec)
	if err != nil {
		return 0, err
	}
	to, err := parse[save.Spec]("spec", spec)
	if err != nil {
		return 0, err
	}
	return start(job.Start("convert", func(ctx context.Context, j *job.Job) error {
		r, err := save.Convert(ctx, j, from.URIs, to.Path, to)
		j.SetReport(r)
		preload.Sweep(to.Path)
		return err
	})), nil
}

// VerifyStart begins to prove every byte of the files "uris" of the JSON.
func VerifyStart(spec string) (uint64, error) {
	s, err := parse[load.Spec]("spec", spec)
	if err != nil {
		return 0, err
	}
	return start(job.Start("verify", func(ctx context.Context, j *job.Job) error {
		r, err := save.Verify(ctx, j, s.URIs, s.Storage)
		j.SetReport(r)
		return err
	})), nil
}

// FetchStart begins to write the bytes of the URIs of the JSON of a fetch.Spec
// to the open file whose descriptor "fd" is: a duplicate is used.
func FetchStart(spec string) (uint64, error) {
	s, err := parse[fetch.Spec]("spec", spec)
	if err != nil {
		return 0, err
	}
	to, err := parse[struct {
		FD uintptr `json:"fd"`
	}]("spec", spec)
	if err != nil {
		return 0, err
	}
	own, err := unix.FcntlInt(to.FD, unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return 0, fault.FromOS(err)
	}
	return start(job.Start("fetch", func(ctx context.Context, j *job.Job) error {
		f := os.NewFile(uintptr(own), "fetch")
		defer f.Close()
		r, err := fetch.Fetch(ctx, j, s, f)
		j.SetReport(r)
		return err
	})), nil
}

// PreloadStart begins a preload of what the JSON names: the fields of
// load.Spec and load.Options in one object.
func PreloadStart(spec string) (uint64, error) {
	s, err := parse[load.Spec]("spec", spec)
	if err != nil {
		return 0, err
	}
	opt, err := parse[load.Options]("spec", spec)
	if err != nil {
		return 0, err
	}
	return jobs.put(&entry{pre: preload.Start(s, opt)}), nil
}

// PreloadJoin lets loads of a model take what was preloaded of its files, and
// returns a preload.Answer as JSON: "" if time is up first. options are the JSON of
// load.Options, those of the loads, and "alone": the loads take nothing, and
// preloads of the files are dropped.
func PreloadJoin(h uint64, options string, d time.Duration) (string, error) {
	opt, err := parse[load.Options]("options", options)
	if err != nil {
		return "", err
	}
	how, err := parse[struct {
		Alone bool `json:"alone"`
	}]("options", options)
	if err != nil {
		return "", err
	}
	m, err := models.get(h)
	if err != nil {
		return "", err
	}
	a, done := preload.Join(m, opt, how.Alone, d)
	if !done {
		return "", nil
	}
	return encode(a)
}

// PreloadSweep drops the preloads of what was just replaced at a URI; see
// preload.Sweep. It returns a preload.Answer with its notes as JSON.
func PreloadSweep(text string) (string, error) {
	uri, err := parse[string]("uri", text)
	if err != nil {
		return "", err
	}
	preload.Sweep(uri)
	return encode(preload.Answer{Notes: preload.Said()})
}
