package plan

// This file chooses which blocks of a model an offload keeps on a device and which it streams, and says what each tier
// of memory needs. It uses only the names and sizes of tensors.

import (
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	// A module larger than largestShare of the model is cut if lists of modules hold at least listedShare of its
	// bytes. overwire.offloading.blocks cuts real modules in the same way.
	largestShare = 1.0 / 16
	listedShare  = 0.8
)

// An Offload describes what overwire.offload would do with a model. Sizes are in bytes.
type Offload struct {
	Rest     int64    `json:"rest"`     // weights outside blocks, which stay on the device
	Kept     int64    `json:"kept"`     // blocks that stay on the device
	Streamed int64    `json:"streamed"` // blocks that are streamed
	Stored   int64    `json:"stored"`   // maximum memory of streamed blocks in their tier
	Ring     int64    `json:"ring"`     // device memory for blocks streamed from the host, with two slots
	Slots    int64    `json:"slots"`    // device memory of the two slots only
	Blocks   []string `json:"blocks"`   // names of the streamed blocks, in the order of the tensors
}

// DeviceBytes returns the device memory that the weights need, including the ring.
func (o *Offload) DeviceBytes() int64 { return addSaturating(addSaturating(o.Rest, o.Kept), o.Ring) }

// A Tier describes how much memory a model's weights need if they are in one place, and what a pass costs then.
type Tier struct {
	Where  string `json:"where"`  // "resident" for no offload, or overwire.offload's argument where
	Device int64  `json:"device"` // bytes of device memory
	Host   int64  `json:"host"`   // bytes of host memory
	Cost   string `json:"cost"`
	Group  string `json:"group,omitempty"` // what the argument group changes, if several GPUs run the model
}

// TierList returns the tiers for the model, the fastest first. If there are no blocks to stream, it returns only one.
func (o *Offload) TierList() []Tier {
	weights := addSaturating(addSaturating(o.Rest, o.Kept), o.Streamed)
	tiers := []Tier{{Where: "resident", Device: weights, Cost: "a pass costs nothing more"}}
	if len(o.Blocks) == 0 {
		return tiers
	}
	device := addSaturating(addSaturating(o.Rest, o.Kept), addSaturating(o.Stored, o.Slots))
	return append(tiers,
		Tier{Where: "device", Device: device, Cost: "each pass decodes all weights: long prompts, batches and " +
			"diffusion hide it, but at one token at a time a pass takes 2 to 3 times as long as with resident weights"},
		Tier{Where: "host", Device: o.DeviceBytes(), Host: o.Stored, Cost: "each pass also copies all compressed " +
			"weights to the device: only passes that compute for longer than the copy hide it",
			Group: "with group=, each of N GPUs of a host keeps and copies 1/N of the compressed weights: passes " +
				"that wait for copies are faster, others only save host memory"})
}

// A module groups the tensors with the same first elements of their names.
type module struct {
	name          string
	bytes, stored int64
	children      []*module
	byName        map[string]*module
}

// OffloadOf plans the offload of a model with these parts. nbytes holds the size of each part, and at most keep bytes
// of blocks stay on the device. A name with only numbered children is a list of modules.
func OffloadOf(ix *tensor.Index, parts []Part, nbytes []int64, keep int64) Offload {
	root := &module{}
	for i, p := range parts {
		t := &ix.Tensors[p.Tensor]
		if t.Alias >= 0 { // a file stores equal tensors once, an offload stores each
			t = &ix.Tensors[t.Alias]
		}
		length := t.Stored
		if t.Count > 0 { // the tables of a stream of the tensor's chunks
			length = addSaturating(length, 512+48*int64(t.Count))
		}
		root.addTensor(ix.Tensors[p.Tensor].Name, nbytes[i], length)
	}
	blocks := root.cutLists(nil, largestShare*float64(root.bytes))
	lengths := make([]int64, len(blocks))
	for i, b := range blocks {
		lengths[i] = b.bytes
	}
	staying := KeptBlocks(lengths, keep)
	o := Offload{Rest: root.bytes, Blocks: []string{}}
	for i, b := range blocks {
		o.Rest -= b.bytes
		if slices.Contains(staying, int64(i)) {
			o.Kept += b.bytes
			continue
		}
		o.Streamed += b.bytes
		o.Stored = addSaturating(o.Stored, b.stored)
		o.Ring = max(o.Ring, mulSaturating(addSaturating(b.bytes, b.stored), 2))
		o.Slots = max(o.Slots, mulSaturating(b.bytes, 2))
		o.Blocks = append(o.Blocks, b.name)
	}
	return o
}

// KeptBlocks returns the numbers of the blocks that stay on the device. Together they have at most keep bytes. They are
// spread evenly, so that the next streamed block can be fetched while one of them runs.
func KeptBlocks(nbytes []int64, keep int64) []int64 {
	count, sum := 0, int64(0)
	for _, n := range slices.Sorted(slices.Values(nbytes)) { // upper bound: how many of the smallest blocks fit
		if sum = addSaturating(sum, n); sum > keep {
			break
		}
		count++
	}
	for ; count > 0; count-- {
		numbers, sum := make([]int64, count), int64(0)
		for i := range numbers {
			numbers[i] = int64(i * len(nbytes) / count)
			sum = addSaturating(sum, nbytes[numbers[i]])
		}
		if sum <= keep {
			return numbers
		}
	}
	return []int64{}
}

// addTensor adds the sizes of a tensor to each module on the path of its name.
func (m *module) addTensor(name string, nbytes, stored int64) {
	for at, rest := "", name; ; {
		m.bytes, m.stored = addSaturating(m.bytes, nbytes), addSaturating(m.stored, stored)
		if rest == "" {
			return
		}
		var key string
		key, rest, _ = strings.Cut(rest, ".")
		at = strings.TrimPrefix(at+"."+key, ".")
		m = m.childOf(key, at)
	}
}

func (m *module) childOf(key, name string) *module {
	c := m.byName[key]
	if c == nil {
		if m.byName == nil {
			m.byName = map[string]*module{}
		}
		c = &module{name: name}
		m.byName[key], m.children = c, append(m.children, c)
	}
	return c
}

// isList reports whether the names of all children are numbers.
func (m *module) isList() bool {
	for key := range m.byName {
		if strings.Trim(key, "0123456789") != "" || key == "" {
			return false
		}
	}
	return len(m.children) > 0
}

// cutLists appends the children of a module's lists to blocks. It also cuts children of more than limit bytes.
func (m *module) cutLists(blocks []*module, limit float64) []*module {
	for _, c := range m.children {
		if !c.isList() {
			blocks = c.cutLists(blocks, limit)
			continue
		}
		for _, b := range c.children {
			var inner []*module
			if float64(b.bytes) > limit {
				inner = b.cutLists(nil, limit)
			}
			inLists := int64(0)
			for _, part := range inner {
				inLists += part.bytes
			}
			switch {
			case b.bytes == 0:
			case float64(inLists) >= listedShare*float64(b.bytes):
				blocks = append(blocks, inner...)
			default:
				blocks = append(blocks, b)
			}
		}
	}
	return blocks
}
