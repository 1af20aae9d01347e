package main

// This file measures ratios, and the weight codec alone on one core.

import (
	"bytes"
	"fmt"
	"os"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/measure"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/tensor"
)

// codecBytes is how much of each kind the codec rows use, unless the load rows use
// less.
const codecBytes = 128 << 20

// ratios are the kinds whose size is measured, and the goal of each.
var ratios = []struct {
	kind, name string
	goal       float64
	near       bool // within 0.5 % of the bound
}{
	{"llama-bf16", "generated bf16", 0.667, true},
	{"fp16", "generated fp16", 0.850, false},
	{"fp32", "generated fp32", 0, false},
	{"fp32-bf16", "generated fp32 that holds bf16", 0, false},
	{"fp8-e4m3", "generated fp8 e4m3", 0, false},
	{"fp8-e5m2", "generated fp8 e5m2", 0, false},
	{"int8", "generated int8", 0, false},
	{"int4", "generated int4", 0, false},
	{"pruned", "generated bf16, half of it zero", 0, false},
	{"tied", "generated bf16, lm_head tied", 0, false},
	{"uniform", "uniform random", 1.001, false},
}

// measureCodec measures what compression gains, and the coder alone on one core.
func (r *run) measureCodec() error {
	size := min(codecBytes, r.Size)
	for _, k := range ratios {
		in, _, err := r.Make(k.kind, size, 1)
		if err != nil {
			return err
		}
		if err := r.addRatio(k.name, in, k.goal, k.near); err != nil {
			return err
		}
		if k.kind == "llama-bf16" {
			if err := r.measureCoder(); err != nil {
				return err
			}
		}
	}
	if r.opt.File == "" {
		r.Missing("codec", "real fp32: stored / original", "give real weights with --file model.safetensors")
		return nil
	}
	in, err := r.File(r.opt.File)
	if err != nil {
		return err
	}
	return r.addRatio("real fp32", in, 0.84, false)
}

// compressed is the file that addRatio and measureCoder work on.
const compressed = "codec.safetensors"

// addRatio adds the row of a compression ratio, beside its goal.
func (r *run) addRatio(name string, in []save.Input, goal float64, near bool) error {
	row, err := r.Ratio(r.Path(compressed), in)
	if err != nil {
		return err
	}
	row.Group, row.Name = "codec", name+": stored / original"
	if goal > 0 {
		row.Goal = fmt.Sprintf("<= %.3f", goal)
		row.Reached = atMost(row.Value, goal)
	}
	if near {
		row.Goal += ", <= 1.005 x field entropy"
		ok := *row.Reached && row.Value/row.Floor <= 1.005
		row.Reached = &ok
	}
	r.Add(row)
	return nil
}

// measureCoder measures the decoders and the encoder on the bf16 file of addRatio.
func (r *run) measureCoder() error {
	file, err := os.ReadFile(r.Path(compressed))
	if err != nil {
		return errs.New(errs.ErrIO, "%v", err)
	}
	m, err := load.Open(r.Ctx, load.Spec{URIs: []string{r.Path(compressed)}})
	if err != nil {
		return err
	}
	defer m.Close()
	var chunks []tensor.Chunk
	var total int64
	for _, c := range m.Index().Chunks {
		if c.Codec == tensor.CodecX16 && c.Transform == x16.BF16 {
			chunks = append(chunks, c)
			total += int64(c.Logical)
		}
	}
	stored := func(c tensor.Chunk) []byte { return file[c.Off : c.Off+int64(c.Stored)] }
	return measure.Fresh(total, func(dst []byte) error {
		measure.Touch(dst)
		stream := func(level x16.Level) error {
			out := dst
			for _, c := range chunks {
				if err := x16.DecodeAt(level, out[:c.Logical], stored(c), c.Transform, c.SegTiles); err != nil {
					return err
				}
				out = out[c.Logical:]
			}
			return nil
		}
		if err := stream(x16.Best()); err != nil { // dst now holds the original, proven by addRatio
			return err
		}
		if err := r.measureEncoder(dst[:min(total, 64<<20)]); err != nil {
			return err
		}
		for _, level := range []x16.Level{x16.AVX512, x16.AVX2, x16.Scalar} {
			goal := map[x16.Level]float64{x16.AVX512: 10, x16.AVX2: 4, x16.Scalar: 1.2}[level]
			name := fmt.Sprintf("decode bf16, %v, one core, in cache", level)
			if level > x16.Best() {
				r.Missing("codec", name, "this CPU or build has no such instructions")
				continue
			}
			v, err := r.residentRate(level, dst)
			if err != nil {
				return err
			}
			r.Add(measure.Row{Group: "codec", Name: name, Value: v, Unit: "GB/s", Floor: r.Report.Floors.CopyOne,
				FloorName: "memcpy one core", Goal: fmt.Sprintf(">= %g", goal), Reached: atLeast(v, goal)})
		}
		v, err := r.Speed(total, func() error { return stream(x16.Best()) })
		if err != nil {
			return err
		}
		r.Add(measure.Row{Group: "codec", Name: fmt.Sprintf("decode bf16, %v, one core, to memory", x16.Best()),
			Value: v, Unit: "GB/s",
			Floor: r.Report.Floors.CopyOne, FloorName: "memcpy one core", Goal: ">= 0.6 x floor",
			Reached: atLeast(v, 0.6*r.Report.Floors.CopyOne)})
		v, err = r.Speed(total, func() error {
			for _, c := range chunks {
				if codec.Sum(stored(c)) != c.Sum {
					return errs.New(errs.ErrCorrupt, "checksum of a chunk just written")
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		r.Add(measure.Row{Group: "codec", Name: "CRC32C of the stored bytes, one core, per tensor byte", Value: v,
			Unit: "GB/s"})
		return nil
	})
}

// residentRate is the rate of decoding one small chunk again and again.
func (r *run) residentRate(level x16.Level, original []byte) (float64, error) {
	src := original[:min(256<<10, len(original))]
	var e x16.Encoder
	chunk, seg, ok := e.Encode(nil, src, x16.BF16)
	if !ok {
		return 0, errs.New(errs.ErrEngine, "a chunk of generated bf16 did not compress")
	}
	dst := make([]byte, len(src))
	if err := x16.DecodeAt(level, dst, chunk, x16.BF16, seg); err != nil {
		return 0, err
	}
	if !bytes.Equal(dst, src) {
		return 0, errs.New(errs.ErrEngine, "the %v decoder gives other bytes", level)
	}
	const times = 400
	return r.Speed(times*int64(len(src)), func() error {
		for range times {
			if err := x16.DecodeAt(level, dst, chunk, x16.BF16, seg); err != nil {
				return err
			}
		}
		return nil
	})
}

// measureEncoder measures encoding chunks of 1 MiB on one core; every one is decoded and
// compared first.
func (r *run) measureEncoder(src []byte) error {
	const piece = 1 << 20
	var e x16.Encoder
	out, back := make([]byte, 0, 2*piece), make([]byte, piece)
	each := func(fn func(p, chunk []byte, seg uint16) error) error {
		for at := 0; at < len(src); at += piece {
			p := src[at:min(len(src), at+piece)]
			chunk, seg, ok := e.Encode(out[:0], p, x16.BF16)
			if !ok {
				return errs.New(errs.ErrEngine, "a chunk of generated bf16 did not compress")
			}
			if fn != nil {
				if err := fn(p, chunk, seg); err != nil {
					return err
				}
			}
		}
		return nil
	}
	if err := each(func(p, chunk []byte, seg uint16) error {
		if err := x16.Decode(back[:len(p)], chunk, x16.BF16, seg); err != nil {
			return err
		}
		if !bytes.Equal(back[:len(p)], p) {
			return errs.New(errs.ErrEngine, "a chunk did not come back bit for bit")
		}
		return nil
	}); err != nil {
		return err
	}
	v, err := r.Speed(int64(len(src)), func() error { return each(nil) })
	if err != nil {
		return err
	}
	r.Add(measure.Row{Group: "codec", Name: "encode bf16, one core", Value: v, Unit: "GB/s",
		Floor:     r.Report.Floors.CopyOne,
		FloorName: "memcpy one core", Goal: ">= 0.8", Reached: atLeast(v, 0.8)})
	return nil
}
