package main

// This file measures the opening of a file of very many tensors.

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/measure"
)

// measureHeaders measures opening a plain file of very many tensors: its header is parsed
// and checked anew each time. Beside it a general JSON parser, which checks no rule
// of the format.
func (r *run) measureHeaders() error {
	const tensors, each = 200_000, 512
	head := []byte{0, 0, 0, 0, 0, 0, 0, 0, '{'}
	for i := range tensors {
		if i > 0 {
			head = append(head, ',')
		}
		head = fmt.Appendf(head, `"model.layers.%d.mlp.experts.%d.w%d.weight":`, i/3000, i%128, i)
		head = append(head, `{"dtype":"BF16","shape":[16,16],"data_offsets":[`...)
		head = strconv.AppendInt(head, int64(i)*each, 10)
		head = append(head, ',')
		head = strconv.AppendInt(head, int64(i+1)*each, 10)
		head = append(head, "]}"...)
	}
	head = append(head, '}')
	binary.LittleEndian.PutUint64(head, uint64(len(head)-8))
	path := r.Path("header.safetensors")
	defer os.Remove(path)
	err := os.WriteFile(path, head, 0o600)
	if err == nil {
		err = os.Truncate(path, int64(len(head))+tensors*each) // a hole: no tensor is read
	}
	if err != nil {
		return errs.New(errs.ErrIO, "%v", err)
	}
	s, err := r.Median(func() error {
		now := time.Now() // another state of the file: its header is not cached
		if err := os.Chtimes(path, now, now); err != nil {
			return errs.New(errs.ErrIO, "%v", err)
		}
		m, err := load.Open(r.Ctx, load.Spec{URIs: []string{path}})
		if err == nil {
			m.Close()
		}
		return err
	})
	if err != nil {
		return err
	}
	text := head[8:]
	floor, err := r.Median(func() error {
		type entry struct {
			DType   string   `json:"dtype"`
			Shape   []int64  `json:"shape"`
			Offsets [2]int64 `json:"data_offsets"`
		}
		var table map[string]entry
		if err := json.Unmarshal(text, &table); err != nil || len(table) != tensors {
			return errs.New(errs.ErrEngine, "encoding/json: %d tensors, %v", len(table), err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	us := 1e6 * s / tensors
	r.Add(measure.Row{Group: "many", Name: fmt.Sprintf("open a plain file of %d tensors: each", tensors), Value: us,
		Unit:  "us",
		Floor: 1e6 * floor / tensors, FloorName: "encoding/json", Goal: "<= 1", Reached: atMost(us, 1),
		Note: fmt.Sprintf("%.0f MB of header", float64(len(head))/1e6)})
	return nil
}
