package relay

// This file decodes the pieces of a relay to the destinations of this rank's requests.

import (
	"context"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A decoder decodes shares for this rank's requests.
type decoder struct {
	job      *job.Job
	model    *load.Model
	lay      *layout
	prog     *progress
	counts   *profile
	queue    *queue.Queue // nil if the host decodes
	threads  int          // of the host's decoder
	landings *job.Landings

	aimed  chan struct{}       // closed by setRequests, when the fields below are set
	tasks  []device.DecodeTask // sorted by piece, and within a piece by the rank that reads the chunk
	refs   []plan.Ref          // indexed by task
	wants  []plan.Want
	coming []int32 // indexed by request: unfinished decode tasks
}

// noTask is the task number of a placeholder that decodes nothing.
const noTask = -1

// setRequests sets the decode tasks and their wants. The caller holds progress.mu.
func (d *decoder) setRequests(p *plan.Plan, wants []plan.Want) {
	d.tasks, d.refs, d.coming, d.wants = p.Tasks, p.Refs, p.Left, wants
	for i, n := range p.Left {
		if n == 0 { // a tensor without bytes
			d.job.Tensors.Add(1)
			d.landings.Add(i)
		}
	}
	for i := range wants {
		d.job.TotalBytes.Add(wants[i].Bytes)
	}
	d.job.TotalTensors.Store(int64(len(wants)))
	close(d.aimed)
}

// tasksOf returns the range [first, end) of this rank's decode tasks in shares.
func (d *decoder) tasksOf(of shares) (first, end int) {
	return d.lay.partOf(of.piece, of.firstRank).firstTask, d.lay.partOf(of.piece, of.endRank-1).endTask
}

// decodeOnHost decodes shares on this rank's cores and returns when they are decoded.
func (d *decoder) decodeOnHost(of shares) error {
	first, end := d.tasksOf(of)
	tasks, base := d.tasks[first:end], d.lay.ringOf(of.piece, of.firstRank).base
	err := spawn.Each(context.Background(), "relay", d.threads, len(tasks), func(i int) error {
		t := &tasks[i]
		if err := cpu.Decode(t, unsafe.Slice((*byte)(unsafe.Add(base, t.Src)), t.Chunk.Stored)); err != nil {
			return d.locateError(first+i, err)
		}
		d.countTask(first + i)
		return nil
	})
	if err != nil {
		d.prog.failWith(err, false)
		return err
	}
	d.prog.markQueued(of, nil)
	d.prog.markDecoded(of)
	return nil
}

// queueDecoding queues the decoding of a batch of shares that are in the same memory, after the work that is now on
// the streams. queueDecoding owns the slot.
func (d *decoder) queueDecoding(slot *queue.Slot, batch []shares, streams []uintptr) error {
	isSubmitted := false
	defer func() {
		if !isSubmitted { // a panic came before Submit: return the slot, because Close waits for every slot
			d.queue.Put(slot)
		}
	}()
	slot.DelayKernels(streams...)
	ring := d.lay.ringOf(batch[0].piece, batch[0].firstRank)
	slot.ViewDevice(uintptr(ring.base), ring.bytes)
	var tasks []device.DecodeTask
	var numbers []int // index in d.tasks of each task
	for _, of := range batch {
		first, end := d.tasksOf(of)
		tasks = append(tasks, d.tasks[first:end]...)
		for n := first; n < end; n++ {
			numbers = append(numbers, n)
		}
	}
	if len(tasks) == 0 { // this rank needs nothing from the batch, but must free its buffers after the exchange
		tasks, numbers = []device.DecodeTask{{Chunk: tensor.Chunk{Codec: tensor.CodecRaw}}}, []int{noTask}
	}
	left := len(tasks)
	defer d.counts.countDriverTime(time.Now())
	isSubmitted = true
	err := d.queue.Submit(slot, ring.bytes, tasks, func(i int, err error) {
		if err != nil {
			d.prog.failWith(d.locateError(numbers[i], err), false)
			return
		}
		d.countTask(numbers[i])
		if left--; left == 0 {
			for _, of := range batch {
				d.prog.markDecoded(of)
			}
		}
	})
	if err != nil {
		err = d.locateError(numbers[0], err)
		d.prog.failWith(err, true)
		return err
	}
	for _, of := range batch {
		d.prog.markQueued(of, slot.EndEvent())
	}
	return nil
}

// countTask counts a finished decode task. A request has landed after its last task.
func (d *decoder) countTask(task int) {
	if task == noTask {
		return
	}
	want := d.refs[task].Want
	d.job.Bytes.Add(int64(d.tasks[task].Chunk.Logical))
	if atomic.AddInt32(&d.coming[want], -1) == 0 {
		d.job.Tensors.Add(1)
		d.landings.Add(int(want))
	}
}

// locateError adds the tensor and chunk of a decode task to an error.
func (d *decoder) locateError(task int, err error) error {
	if task == noTask {
		return d.model.LocateError("decode", err)
	}
	ref := d.refs[task]
	w := &d.wants[ref.Want]
	n := int64(ref.N)
	if d.lay.bare[w.Data] {
		n = -1
	}
	return errorAt(d.model, "decode", w.Tensor, n, d.tasks[task].Chunk.Off, err)
}

// errorAt returns an error with the location of a tensor's chunk. chunk -1 means the bytes of a plain tensor.
func errorAt(m *load.Model, verb string, tensor int32, chunk, off int64, err error) error {
	t := &m.Seen().Tensors[tensor]
	return &errs.At{Verb: verb, Source: m.Seen().Sources[t.Source].URI, Tensor: t.Name, Chunk: chunk,
		Offset: off, Err: err}
}
