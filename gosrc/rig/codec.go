package main

// This file measures ratios.

import (
	"fmt"

	"github.com/overwire/overwire/gosrc/save"
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

// addRatio adds the row of a compression ratio, beside its goal.
func (r *run) addRatio(name string, in []save.Input, goal float64, near bool) error {
	row, err := r.Ratio(r.Path("codec.safetensors"), in)
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
