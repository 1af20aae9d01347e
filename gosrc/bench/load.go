package bench

import (
	"encoding/json"
	"fmt"
	"hash/crc32"
	"os"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/weights"
)

// loaded opens a file, loads all of it into fresh memory, calls fn with the
// bytes by tensor, and gives them back. Nothing is mapped.
func loaded(r *run, path string, opt load.Options, fn func(*load.Model, [][]byte) error) error {
	mapped := false
	m, err := load.Open(r.ctx, load.Spec{URIs: []string{path}, Map: &mapped})
	if err != nil {
		return err
	}
	defer m.Close()
	l, err := m.Start(nil, opt)
	if err != nil {
		return err
	}
	defer l.Close()
	if _, err := l.Job().Wait(-1); err != nil {
		return err
	}
	if fn == nil {
		return nil
	}
	data := make([][]byte, l.Len())
	for i := range data {
		mem, _, _, ok := l.Take(i)
		if !ok {
			return fault.New(fault.ErrEngine, "%s: tensor %d has no memory", path, i)
		}
		defer mem.Release()
		if mem.Bytes > 0 {
			data[i] = mem.Slice()
		}
	}
	return fn(m, data)
}

const (
	bigPlain      = "big-plain.safetensors"
	bigCompressed = "big.safetensors"
	bigSums       = "big-sums.json"
)

// makeBig writes the model of the load rows, plain and compressed, and its
// tensors' checksums for other processes to compare.
func (r *run) makeBig() (int64, error) {
	all, err := weights.Make(weights.Options{Kind: "llama-bf16", Size: r.opt.Size, Seed: 2, Threads: r.opt.Threads})
	if err != nil {
		return 0, err
	}
	in := inputs(all)
	var total int64
	for _, t := range in {
		total += int64(len(t.Data))
	}
	write := func(name string, compress bool) (save.Report, error) {
		return save.Write(r.ctx, r.job, save.Spec{Path: r.path(name), Compress: compress, Threads: r.opt.Threads}, in)
	}
	plain, err := write(bigPlain, false)
	if err != nil {
		return 0, err
	}
	rep, err := write(bigCompressed, true)
	if err != nil {
		return 0, err
	}
	r.add(Row{Group: "load", Name: "compress and save, all cores, with fsync", Value: rate(total, rep.Seconds), Unit: "GB/s",
		Floor: rate(total, plain.Seconds), FloorName: "the same, plain", Note: fmt.Sprintf("one run; ratio %.4f", rep.Ratio)})
	if err := r.same(r.path(bigCompressed), in); err != nil {
		return 0, err
	}
	return total, r.writeSums(bigSums, in)
}

// writeSums writes the CRC-32 (zlib's, which Python has) of every tensor.
func (r *run) writeSums(name string, in []save.Input) error {
	sums := map[string]uint32{}
	for _, t := range in {
		sums[t.Name] = crc32.ChecksumIEEE(t.Data)
	}
	b, err := json.Marshal(sums)
	if err == nil {
		err = os.WriteFile(r.path(name), b, 0o600)
	}
	if err != nil {
		return fault.New(fault.ErrIO, "%v", err)
	}
	return nil
}

// load measures whole loads from the page cache.
func (r *run) load() error {
	total, err := r.makeBig()
	if err != nil {
		return err
	}
	gb := float64(total) / 1e9
	rates := map[bool]float64{}
	// On and off by turns, so that a drifting machine does not choose for us.
	var on, off []float64
	for range r.opt.Repeat {
		for _, noCheck := range []bool{false, true} {
			if err := r.stopped(); err != nil {
				return err
			}
			s, err := timed(func() error {
				return loaded(r, r.path(bigCompressed), load.Options{Threads: r.opt.Threads, NoCheck: noCheck}, nil)
			})
			if err != nil {
				return err
			}
			if noCheck {
				off = append(off, s)
			} else {
				on = append(on, s)
			}
		}
	}
	rates[true], rates[false] = rate(total, middle(on)), rate(total, middle(off))
	r.add(Row{Group: "load", Name: fmt.Sprintf("load %.1f GB compressed bf16, all cores, Go alone", gb), Value: rates[true], Unit: "GB/s",
		Floor: r.report.Floors.RawCopy, FloorName: "pread to fresh memory"})
	r.add(Row{Group: "load", Name: "cost of the checksums", Value: 100 * (middle(on)/middle(off) - 1), Unit: "%",
		Goal: "<= 3 %", Reached: atMost(100*(middle(on)/middle(off)-1), 3)})
	one, err := r.speed(total, func() error { return loaded(r, r.path(bigCompressed), load.Options{Threads: 1}, nil) })
	if err != nil {
		return err
	}
	r.add(Row{Group: "load", Name: "the same on one core", Value: one, Unit: "GB/s",
		Floor: r.report.Floors.CopyOne, FloorName: "memcpy one core"})
	if r.opt.Trace != "" {
		if err := loaded(r, r.path(bigCompressed), load.Options{Threads: r.opt.Threads, Trace: r.opt.Trace}, nil); err != nil {
			return err
		}
	}
	if err := r.pythonLoad(total, gb); err != nil {
		return err
	}
	return r.pythonPlain(total, gb)
}

const (
	manyFile = "many.safetensors"
	oneFile  = "one.safetensors"
	manySums = "many-sums.json"

	manyPlain = "many-plain.safetensors"
	onePlain  = "one-plain.safetensors"
)

// many measures what a tensor costs beside its bytes: a model of 18,867 small
// tensors against the same bytes in one tensor.
func (r *run) many() error {
	all, err := weights.Make(weights.Options{Kind: "moe-bf16", Size: min(r.opt.Size, 128<<20), Seed: 3, Threads: r.opt.Threads})
	if err != nil {
		return err
	}
	in := inputs(all)
	var joined []byte
	for _, t := range in {
		joined = append(joined, t.Data...)
	}
	one := []save.Input{{Name: "all", DType: tensor.BF16, Shape: []int64{int64(len(joined) / 2)}, Data: joined}}
	for _, w := range []struct {
		name     string
		in       []save.Input
		compress bool
	}{{manyFile, in, true}, {oneFile, one, true}, {manyPlain, in, false}, {onePlain, one, false}} {
		spec := save.Spec{Path: r.path(w.name), Compress: w.compress, Threads: r.opt.Threads}
		if _, err := save.Write(r.ctx, nil, spec, w.in); err != nil {
			return err
		}
		if err := r.same(r.path(w.name), w.in); err != nil {
			return err
		}
	}
	if err := r.writeSums(manySums, in); err != nil {
		return err
	}
	for _, c := range []struct{ what, many, one string }{{"compressed", manyFile, oneFile}, {"plain, not mapped", manyPlain, onePlain}} {
		var seconds [2]float64
		for i, name := range []string{c.many, c.one} {
			if seconds[i], err = r.median(func() error { return loaded(r, r.path(name), load.Options{Threads: r.opt.Threads}, nil) }); err != nil {
				return err
			}
		}
		r.add(Row{Group: "many", Name: fmt.Sprintf("%d tensors, %s: each beside its bytes, Go alone", len(in), c.what),
			Value: 1e6 * (seconds[0] - seconds[1]) / float64(len(in)), Unit: "us"})
	}
	if err := r.headers(); err != nil {
		return err
	}
	return r.pythonMany(len(in))
}
