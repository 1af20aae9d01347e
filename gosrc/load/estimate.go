package load

// This file estimates how much memory a load would need, and refuses loads over a budget. It allocates nothing and
// does not touch the GPU.

import (
	"strings"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/pipeline"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Prospect describes a possible load.
type Prospect struct {
	Device string `json:"device"`
	// DType is the dtype that floating-point tensors are cast to, or "" if the engine does not know the dtype. Item is
	// the size of its elements in bytes; 0 means no cast. Unless Late is set, the GPU casts tensors as they land if it
	// has a kernel for the cast. The caller casts the rest afterwards.
	DType string `json:"dtype"`
	Item  int64  `json:"item"`
	Late  bool   `json:"late"`
	// Unpack means that the caller expands each F4 element to a byte.
	Unpack bool `json:"unpack"`
	// Budget is the maximum memory for tensors in bytes; 0 means no limit.
	Budget int64 `json:"max_memory"`
	// Stream means that tensors are loaded in windows that fit in the budget.
	Stream bool `json:"stream"`
	// Keep is how many bytes of blocks an offload would keep on the device; nil means no offload.
	Keep *int64 `json:"keep"`
}

// An Estimate is the memory that a load would need.
type Estimate struct {
	Bytes []int64 `json:"bytes"` // size of each tensor after the load
	Peak  int64   `json:"peak"`  // largest total size of the tensors at any time during the load
	// Staging is the maximum memory of the slots that stored bytes pass through on the device; a coherent GPU needs
	// none. Pinned is the host memory for a GPU's slots.
	Staging int64         `json:"staging"`
	Pinned  int64         `json:"pinned"`
	Windows []plan.Window `json:"windows"` // only for a stream
	Offload *plan.Offload `json:"offload,omitempty"`
	Tiers   []plan.Tier   `json:"tiers,omitempty"` // only with an offload
}

// Part is plan.Part, so that callers of EstimateMemory need not import package plan.
type Part = plan.Part

// KeptBlocks is plan.KeptBlocks, for callers that do not import package plan.
func KeptBlocks(nbytes []int64, keep int64) []int64 { return plan.KeptBlocks(nbytes, keep) }

// EstimateMemory estimates the memory for loading parts of tensors; nil means all tensors. If the load exceeds the
// budget, the error is errs.ErrMemory.
func EstimateMemory(m *Model, parts []Part, q Prospect) (o Estimate, err error) {
	if q.Budget < 0 || q.Item < 0 || q.Stream && q.Budget == 0 {
		return o, errs.New(errs.ErrArgument,
			"invalid max_memory %d or element size %d: expected 0 or more, and for a stream a max_memory over 0",
			q.Budget, q.Item)
	}
	if parts == nil {
		parts = make([]Part, len(m.ix.Tensors))
		for i := range parts {
			parts[i] = Part{Tensor: int64(i), Elements: plan.Whole}
		}
	}
	costs, err := q.costsOf(m.ix, parts)
	if err != nil {
		return o, err
	}
	o.Bytes, o.Peak = make([]int64, len(costs)), plan.Peak(costs)
	largest := 0
	for i := range costs {
		o.Bytes[i] = costs[i].Stays
		if o.Bytes[i] > o.Bytes[largest] {
			largest = i
		}
	}
	if q.Keep != nil {
		offload := plan.OffloadOf(m.ix, parts, o.Bytes, *q.Keep)
		o.Offload, o.Tiers = &offload, offload.TierList()
	}
	if q.Stream {
		var over int
		if o.Windows, over = plan.Windows(costs, q.Budget); over >= 0 {
			n := plan.Peak(costs[over : over+1])
			return o, q.overBudget("stream", m.ix, parts[over].Tensor,
				"'%[1]s' takes %[2]d bytes on %[3]s, %[4]d over max_memory of %[5]d", n)
		}
		return o, nil
	}
	if err := o.countStaging(m, parts, q.onGPU()); err != nil {
		return o, err
	}
	if q.Budget > 0 && o.Peak > q.Budget {
		return o, q.overBudget("load", m.ix, parts[largest].Tensor,
			"%[6]d tensors take %[2]d bytes on %[3]s, %[4]d over max_memory of %[5]d; the largest is '%[1]s' with "+
				"%[7]d; reading takes %[8]d bytes more. Load fewer tensors with keys= or filter=, or use "+
				"stream(max_memory=)", o.Peak,
			len(parts), o.Bytes[largest], o.Staging)
	}
	return o, nil
}

// overBudget returns the error for a tensor that exceeds the budget. If several tensors exceed it together, at is the
// largest one.
func (q *Prospect) overBudget(verb string, ix *tensor.Index, at int64, format string, n int64, more ...any) error {
	t := &ix.Tensors[at]
	args := append([]any{t.Name, n, q.Device, n - q.Budget, q.Budget}, more...)
	return &errs.At{Verb: verb, Source: ix.Sources[t.Source].URI, Tensor: t.Name, Chunk: -1, Offset: -1,
		Err: errs.New(errs.ErrMemory, format, args...)}
}

func (q *Prospect) onGPU() bool { return strings.HasPrefix(q.Device, "cuda") }

func (q *Prospect) costsOf(ix *tensor.Index, parts []Part) ([]plan.Cost, error) {
	to, known := tensor.ParseDType(q.DType)
	if q.DType != "" && !known {
		return nil, errs.New(errs.ErrArgument, "cannot cast to %q: expected a dtype", q.DType)
	}
	then := plan.Conversion{To: to, Item: q.Item, Unpack: q.Unpack}
	if q.onGPU() && known && !q.Late {
		then.OnTheWay = func(from tensor.DType) bool { return queue.CanCast(device.Cast{From: from, To: to}) }
	}
	return plan.Costs(ix, parts, then)
}

// countStaging computes the size of the slots that tensors are read into.
func (o *Estimate) countStaging(m *Model, parts []Part, gpu bool) error {
	reqs := make([]Request, len(parts))
	for i, p := range parts {
		reqs[i] = Request{Tensor: p.Tensor, Hi0: plan.Whole, Hi1: plan.Whole}
	}
	wants, err := plan.Check(m.ix, reqs)
	if err != nil {
		return err
	}
	dest, maps := make([]unsafe.Pointer, len(reqs)), m.mapped()
	for i := range wants {
		if gpu || !m.inFile(&wants[i], maps) {
			dest[i] = device.Pointer(pending)
		}
	}
	mc := m.Machine(gpu, 0, true)
	p := plan.Make(m.ix, wants, dest, mc.Limits())
	if gpu {
		slots, size := ringFor(p.Slot, mc)
		o.Staging = queue.StagingSize(slots, size)
		o.Pinned = o.Staging
		return nil
	}
	o.Staging = int64(pipeline.HostSlots(min(mc.Workers(0), len(p.Shares)), mc.RangeBytes > 0)) * p.Slot
	return nil
}
