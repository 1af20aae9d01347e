package face

import (
	"context"
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/nvcomp"
)

// A coding is the result of a codec job until somebody takes it.
type coding struct {
	mu      sync.Mutex
	results []nvcomp.Result
	dropped bool // the handle is gone: nobody will take it
}

// keep hands the results over, and whether anyone may still want them.
func (c *coding) keep(results []nvcomp.Result) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dropped {
		nvcomp.Release(results)
		return
	}
	c.results = results
}

func (c *coding) drop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dropped = true
	nvcomp.Release(c.results)
	c.results = nil
}

// Coded is one buffer's result: memory that is the receiver's (zero where the
// buffer had its own, or failed), its length, and the text of its error.
type Coded struct {
	Mem    device.Memory
	Bytes  int64
	Error  string
	Summed bool
}

// CodecNames lists the algorithms that CodecStart takes, as JSON.
func CodecNames() (string, error) { return encode(nvcomp.Names()) }

// CodecBuffer describes one buffer; both pieces of memory stay as they are
// until the job has ended. out nil: memory is made for it.
func CodecBuffer(src unsafe.Pointer, n int64, own bool, out unsafe.Pointer, room int64) (nvcomp.Buffer, error) {
	if n < 0 || n > 0 && src == nil || room < 0 || room > 0 && out == nil {
		return nvcomp.Buffer{}, fault.New(fault.ErrArgument, "%d bytes at %p into %d at %p", n, src, room, out)
	}
	return nvcomp.Buffer{Src: unsafe.Slice((*byte)(src), n), Dst: unsafe.Slice((*byte)(out), room), Own: own}, nil
}

// CodecStart begins to encode or decode buffers; spec is the JSON of a
// nvcomp.Spec.
func CodecStart(spec string, in []nvcomp.Buffer) (uint64, error) {
	s, err := codecSpec(spec)
	if err != nil {
		return 0, err
	}
	c := &coding{}
	j := job.Start("codec "+s.Op, func(ctx context.Context, _ *job.Job) error {
		results, err := nvcomp.Run(ctx, s, in)
		if err == nil {
			c.keep(results)
		}
		return err
	})
	return jobs.put(&entry{job: j, coding: c}), nil
}

// CodecTake hands out the results of a codec job that has ended, once.
func CodecTake(h uint64) ([]Coded, error) {
	e, err := jobs.get(h)
	if err != nil {
		return nil, err
	}
	if e.coding == nil || !ended(e.job) {
		return nil, fault.New(fault.ErrArgument, "job %d is no codec job that has ended", h)
	}
	if err := e.job.Err(); err != nil {
		return nil, err
	}
	e.coding.mu.Lock()
	defer e.coding.mu.Unlock()
	out := coded(e.coding.results)
	e.coding.results = nil
	return out, nil
}

func coded(results []nvcomp.Result) []Coded {
	out := make([]Coded, len(results))
	for i, r := range results {
		out[i] = Coded{Mem: r.Mem, Bytes: r.Bytes, Summed: r.Summed}
		if r.Err != nil {
			out[i].Error = Text(r.Err)
		}
	}
	return out
}

// specs are those that were parsed already: programs ask the same again and again.
var specs struct {
	mu  sync.Mutex
	all map[string]nvcomp.Spec
}

const maxSpecs = 64

func codecSpec(text string) (nvcomp.Spec, error) {
	specs.mu.Lock()
	defer specs.mu.Unlock()
	if s, ok := specs.all[text]; ok {
		return s, nil
	}
	s, err := parse[nvcomp.Spec]("spec", text)
	if err != nil {
		return s, err
	}
	if len(specs.all) >= maxSpecs || specs.all == nil {
		specs.all = map[string]nvcomp.Spec{}
	}
	specs.all[text] = s
	return s, nil
}

// CodecNow is CodecStart and CodecTake in one, on the caller's thread, where
// that is over soon; else it does nothing and says so.
func CodecNow(spec string, in []nvcomp.Buffer) (out []Coded, done bool, err error) {
	s, err := codecSpec(spec)
	if err != nil || !nvcomp.Quick(&s, in) {
		return nil, false, err
	}
	results, err := nvcomp.Run(context.Background(), s, in)
	return coded(results), err == nil, err
}
