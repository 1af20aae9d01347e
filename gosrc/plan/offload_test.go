package plan

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/tensor"
)

// A module is cut into blocks if lists hold most of it. Kept blocks are spread evenly and never exceed the allowance.
// Every byte is counted once, even if tensors share bytes in a file.
func TestOffloadOf(t *testing.T) {
	var ix tensor.Index
	var nbytes []int64
	var parts []Part
	add := func(n, stored int64, names ...string) {
		for _, name := range names {
			parts = append(parts, Part{Tensor: int64(len(ix.Tensors)), Elements: Whole})
			ix.Tensors = append(ix.Tensors, tensor.Tensor{Name: name, Bytes: n, Stored: stored, Alias: -1})
			nbytes = append(nbytes, n)
		}
	}
	add(50, 40, "embed.weight", "1")
	for i := range 20 {
		add(10, 7, fmt.Sprintf("layers.%d.up.weight", i), fmt.Sprintf("layers.%d.experts.0.w", i))
	}
	for i := range 3 { // 60 bytes each, 50 of them in lists
		add(25, 25, fmt.Sprintf("stages.7.blocks.%d.w", i))
	}
	ix.Tensors[43].Stored, ix.Tensors[43].Alias = 0, 42
	add(10, 10, "stages.7.norm")
	add(60, 50, "stages.8.lone") // more than a sixteenth of the model, but not in a list
	for _, c := range []struct {
		keep          int64
		kept          int64
		blocks, first int
	}{{0, 0, 24, 0}, {19, 0, 24, 0}, {20, 20, 23, 1}, {120, 100, 19, 1}, {math.MaxInt64, 535, 0, 0}, {-1, 0, 24, 0}} {
		o := OffloadOf(&ix, parts, nbytes, c.keep)
		if o.Kept != c.kept || len(o.Blocks) != c.blocks || o.Rest != 110 || o.Rest+o.Kept+o.Streamed != 645 {
			t.Errorf("keep %d: %+v", c.keep, o)
		}
		wrong := o.DeviceBytes() != o.Rest+o.Kept+o.Ring || o.Ring != 2*(60+50) || o.Slots != 2*60
		if c.blocks > 0 && (wrong || o.Blocks[0] != fmt.Sprintf("layers.%d", c.first)) {
			t.Errorf("keep %d: %+v", c.keep, o)
		}
	}
	stages := []string{"stages.7.blocks.0", "stages.7.blocks.1", "stages.7.blocks.2"}
	if o := OffloadOf(&ix, parts[42:45], nbytes[42:45], 0); o.Stored != 75 || !slices.Equal(o.Blocks, stages) {
		t.Errorf("%+v", o)
	}
	if o := OffloadOf(&tensor.Index{}, nil, nil, 5); o.DeviceBytes() != 0 || o.Blocks == nil {
		t.Errorf("%+v", o)
	}
	deep := strings.Repeat("a.0.", 20_000) // even a name this deep must not crash the process
	ix.Tensors[0].Name = deep + "w"
	if o := OffloadOf(&ix, parts[:1], nbytes[:1], 0); o.Rest+o.Streamed != 50 {
		t.Errorf("%+v", o)
	}
}

func TestKeptBlocks(t *testing.T) {
	for _, c := range []struct {
		nbytes []int64
		keep   int64
		want   []int64
	}{
		{nil, 10, []int64{}},
		{[]int64{10, 10, 10, 10}, 20, []int64{0, 2}},
		{[]int64{10, 10, 10, 10}, 1000, []int64{0, 1, 2, 3}},
		{[]int64{30, 1, 1, 1}, 3, []int64{}}, // spread evenly; each choice includes the first
		{[]int64{math.MaxInt64, math.MaxInt64}, math.MaxInt64 - 1, []int64{}},
		{[]int64{1, 1}, -5, []int64{}},
	} {
		if numbers := KeptBlocks(c.nbytes, c.keep); !slices.Equal(numbers, c.want) {
			t.Errorf("%v, %d: %v, want %v", c.nbytes, c.keep, numbers, c.want)
		}
	}
}
