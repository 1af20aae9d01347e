package binding

// This file defines the verbs that use GPUs.

import (
	"slices"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/nvcomp"
	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	afters  = "the `afters` streams to wait for"
	streams = afters + "; then for each bitstream its address and size, those of its content, and the chunk size"
)

// streamWords is how many numbers describe a bitstream, and contentWords is how many describe a content to encode.
const (
	streamWords  = 5
	contentWords = 6
)

// onDevice makes a verb with a GPU's index as its first number.
func onDevice[R any](name, doc string, run func(d *cuda.Device, n []int64) (R, error)) *Verb {
	return answered(name, doc, ofNumbered(func(index int64) (*cuda.Device, error) { return cuda.Open(int(index)) },
		func(d *cuda.Device, _ none, n []int64) (R, error) { return run(d, n) }))
}

func gpuVerbs() []*Verb {
	return []*Verb{
		answered("gpu_count", "Return the number of GPUs, or 0 without a driver.", func(none, []int64) (int64, error) {
			if driver.Available() != nil {
				return 0, nil
			}
			info, err := driver.Info()
			return int64(len(info)), err
		}),
		answered("gpu_names", "Return the algorithms that GPUs can decode.",
			func(none, []int64) ([]string, error) { return nvcomp.GPUNames(), nil }),
		answered("gpu_of", "Return the GPU that an address belongs to, or -1.",
			func(_ none, n []int64) (int64, error) { return int64(driver.DeviceOf(uint64(n[0]))), nil },
		).ints("address"),
		answered("gpu_mode",
			"Set this thread's CUstreamCaptureMode and return the old one, or -1. A mode of -1 does nothing.",
			func(_ none, n []int64) (int64, error) { return int64(driver.SwapCaptureMode(int(n[0]))), nil },
		).ints("mode"),
		onDevice("gpu_used", "Register a stream that uses memory of the engine and lives as long as the process.",
			func(d *cuda.Device, n []int64) (none, error) { d.NoteStream(uintptr(n[0])); return none{}, nil }).
			ints("device", "stream"),
		onDevice("gpu_follow", "Make a stream wait for the work that is now queued on another stream.",
			func(d *cuda.Device, n []int64) (none, error) {
				return none{}, d.MakeStreamWait(uintptr(n[0]), uintptr(n[1]))
			}).
			ints("device", "stream", "after"),
		onDevice("gpu_stream_new", "Make a stream.", func(d *cuda.Device, _ []int64) (int64, error) {
			s, err := d.NewStream()
			return int64(s), err
		}).ints("device"),
		onDevice("gpu_stream_free", "Free a stream after its work has ended, without waiting.",
			func(d *cuda.Device, n []int64) (none, error) { return none{}, d.FreeStream(uintptr(n[0])) }).
			ints("device", "stream").afterPanics(),
		onDevice("gpu_stream_sync", "Wait for the work that is queued on a stream.",
			func(d *cuda.Device, n []int64) (none, error) { return none{}, d.SyncStream(uintptr(n[0])) }).
			ints("device", "stream").afterPanics(),
		onDevice("gpu_stream_check", "Raise an error for a stream of another GPU.",
			func(d *cuda.Device, n []int64) (none, error) { return none{}, d.CheckStream(uintptr(n[0])) }).
			ints("device", "stream"),
		answered("gpu_transform",
			"Return the X16 transform for a dtype or a sample in host memory, or -1 if it needs a sample.",
			func(dtype Text, n []int64) (int64, error) {
				sample, err := dataAt(uint64(n[0]), n[1])
				if err != nil {
					return 0, err
				}
				t, err := nvcomp.GPUTransform(string(dtype), sample)
				return int64(t), err
			}).ints("sample", "nbytes"),
		onDevice("gpu_alloc",
			"Allocate GPU memory and return it as a tensor, with its address.", gpuAlloc).ints("device", "nbytes"),
		onDevice("gpu_copy", "Queue a copy between any two addresses.",
			func(d *cuda.Device, n []int64) (none, error) {
				on, _, err := queueOf(n[0], n[5], n[6:])
				if err != nil {
					return none{}, err
				}
				return none{}, d.Copy(on, uint64(n[1]), uint64(n[2]), n[3], n[4] != 0)
			}).ints("device", "stream", "dst", "src", "nbytes", "wait", "afters").tail(afters),
		answered("gpu_decode", "Queue the decoding of bitstreams and return the batch, without waiting.",
			func(name Text, n []int64) (int64, error) {
				on, list, err := streamsOf(n)
				if err != nil {
					return 0, err
				}
				b, err := nvcomp.GPUDecode(int(n[0]), on, string(name), list)
				return keepBatch(b, err)
			}).ints("device", "stream", "kind", "afters").tail(streams),
		answered("gpu_peek", "Return the content size, chunk size and algorithm of bitstreams, and errors by number.",
			gpuPeek).ints("device", "stream", "kind", "afters").tail(streams),
		answered("gpu_encode",
			"Queue the encoding to X16 bitstreams and return the batch, without waiting.", gpuEncode).
			ints("device", "stream", "kind", "scratch", "room", "afters").
			tail(afters + "; then for each content its address and size, those of the output, chunk size, transform"),
		answered("gpu_wait",
			"Free a batch that has ended. Return 1, encoded lengths, and errors by number, or nothing if it has not.",
			gpuWait).ints("batch", "wait").afterPanics(),
	}
}

func keepBatch(b *stream.Batch, err error) (int64, error) {
	if err != nil {
		return 0, err
	}
	return int64(keep(b)), nil
}

// queueOf reads an Order: the stream, and the first `after` numbers of rest, which are the streams to wait for. It
// returns the numbers after these.
func queueOf(stream, after int64, rest []int64) (q stream.Order, follows []int64, err error) {
	if after < 0 || after > int64(len(rest)) {
		return q, nil, errs.New(errs.ErrArgument, "%d streams to wait for do not fit in %d numbers", after, len(rest))
	}
	q.Stream = uintptr(stream)
	for _, s := range rest[:after] {
		q.After = append(q.After, uintptr(s))
	}
	return q, rest[after:], nil
}

// streamRows returns the numbers of each bitstream. They follow a verb's fixed numbers, which are device, stream,
// kind, ..., and the number of streams to wait for.
func streamRows(n []int64, fixed, words int) (stream.Order, [][]int64, error) {
	kind := n[2]
	on, flat, err := queueOf(n[1], n[fixed-1], n[fixed:])
	if err == nil && (kind < 0 || kind > int64(nvcomp.WithSize) || len(flat)%words != 0) {
		err, flat = errs.New(errs.ErrArgument, "%d numbers do not describe bitstreams of kind %d", len(flat), kind), nil
	}
	return on, slices.Collect(slices.Chunk(flat, words)), err
}

func streamsOf(n []int64) (stream.Order, []stream.Bitstream, error) {
	on, rows, err := streamRows(n, 4, streamWords)
	list := make([]stream.Bitstream, len(rows))
	for i, p := range rows {
		list[i] = stream.Bitstream{Src: uint64(p[0]), Stored: p[1], Dst: uint64(p[2]), Size: p[3], Chunk: p[4],
			Kind: stream.Kind(n[2])}
	}
	return on, list, err
}

func gpuEncode(_ none, n []int64) (int64, error) {
	on, rows, err := streamRows(n, 6, contentWords)
	if err != nil {
		return 0, err
	}
	list := make([]stream.Bitstream, len(rows))
	for i, p := range rows {
		list[i] = stream.Bitstream{Src: uint64(p[0]), Size: p[1], Dst: uint64(p[2]), Stored: p[3], Chunk: p[4],
			Arg: uint32(p[5]), Kind: stream.Kind(n[2])}
	}
	b, err := nvcomp.GPUEncode(int(n[0]), on, list, uint64(n[3]), n[4])
	return keepBatch(b, err)
}

func gpuAlloc(d *cuda.Device, n []int64) (*Result, error) {
	mem, err := d.Alloc(n[:1])
	if err != nil {
		return nil, err
	}
	one := Exported{Mem: mem[0], Shape: []int64{mem[0].Bytes}, DType: tensor.U8, OK: true}
	return &Result{Tensors: []Exported{one}, Raw: true, Numbers: []int64{int64(uintptr(mem[0].Ptr))}}, nil
}

// peeked is the text of gpu_peek's result.
type peeked struct {
	Algorithms []string `json:"algorithms"`
	Errors     failures `json:"errors"`
}

func gpuPeek(name Text, n []int64) (*Result, error) {
	on, list, err := streamsOf(n)
	if err != nil {
		return nil, err
	}
	all, err := nvcomp.GPUPeek(int(n[0]), on, nvcomp.Kind(n[2]), string(name), list)
	if err != nil {
		return nil, err
	}
	p, numbers := peeked{Errors: failures{}}, make([]int64, 0, 2*len(all))
	for i, g := range all {
		numbers = append(numbers, g.Size, g.Chunk)
		p.Algorithms = append(p.Algorithms, g.Algorithm)
		if g.Err != nil {
			p.Errors[i] = errs.Describe(g.Err)
		}
	}
	r, err := encode(p)
	if err == nil {
		r.Numbers = numbers
	}
	return r, err
}

func gpuWait(_ none, n []int64) (*Result, error) {
	h := uint64(n[0])
	b, err := get[*stream.Batch](h)
	if err != nil {
		return nil, err
	}
	if n[1] == 0 && !b.Done() {
		return &Result{}, nil
	}
	each, err := b.Wait()
	if err != nil && !b.Done() { // the state is unknown, so the caller may wait again
		return nil, err
	}
	drop(h)
	if err != nil {
		return nil, err
	}
	r, texts := &Result{Numbers: append([]int64{1, int64(len(each))}, b.EncodedSizes()...)}, failures{}
	for i, e := range each {
		if e != nil {
			texts[i] = errs.Describe(&errs.At{Verb: "decode", Chunk: -1, Offset: -1, Err: e})
		}
	}
	r.Text, err = texts.text()
	return r, err
}
