package stream

/*
#include "../../../../cuda/abi_delta.h"
*/
import "C"

import (
	"cmp"
	"context"
	"math/bits"
	"runtime"
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// Deltas encodes and applies XOR deltas (codec/delta) of device memory.
type Deltas struct {
	On *Resident
	// Batch is the number of stored bytes in flight per table. The host copies one batch while the device processes the
	// other. 0 means 32 MiB.
	Batch int
}

const deltaRow = int(unsafe.Sizeof(C.ow_delta_row{}))

// deltaBatchBytes is the default value of Deltas.Batch.
const deltaBatchBytes = 32 << 20

// kernelRow returns the row that describes a chunk to the kernels.
func (c *DeltaChunk) kernelRow(at uint64) C.ow_delta_row {
	return C.ow_delta_row{now: C.uint64_t(c.Now), base: C.uint64_t(c.Base), at: C.uint64_t(at),
		bytes:  C.uint32_t(c.Bytes),
		stored: C.uint32_t(len(c.Stored)), lg: C.uint32_t(bits.TrailingZeros(uint(c.Width)))}
}

func checkDelta(chunks []DeltaChunk) error {
	for i := range chunks {
		c := &chunks[i]
		if w := uint64(min(c.Width, 4)); c.Width < 1 || c.Width > 8 || bits.OnesCount(uint(c.Width)) != 1 ||
			c.Bytes <= 0 || c.Bytes > maxBlock ||
			c.Bytes%c.Width != 0 || (c.Now|c.Base)%w != 0 || len(c.Stored)%4 != 0 {
			return errs.New(errs.ErrArgument,
				"invalid delta of %d bytes for %d bytes at %#x and %#x, with elements of %d bytes",
				len(c.Stored), c.Bytes, c.Now, c.Base, c.Width)
		}
	}
	return nil
}

// A deltaBatch is the chunks [lo, hi). bytes is the size of their rows and stored bytes.
type deltaBatch struct{ lo, hi, bytes int }

// divideIntoBatches divides n chunks into batches. stored returns the number of stored bytes of a chunk.
func (d Deltas) divideIntoBatches(n int, stored func(i int) int) (batches []deltaBatch) {
	most := cmp.Or(d.Batch, deltaBatchBytes)
	for i := range n {
		size := deltaRow + stored(i)
		if last := len(batches) - 1; last >= 0 && batches[last].bytes+size <= most {
			batches[last].hi++
			batches[last].bytes += size
		} else {
			batches = append(batches, deltaBatch{i, i + 1, size})
		}
	}
	return batches
}

// runBatchesAtOnce calls f for each batch, with as many concurrent calls as there are tables.
func runBatchesAtOnce(batches []deltaBatch, f func(batch deltaBatch, tableIndex int) error) error {
	return spawn.Each(context.Background(), "cuda delta batch", residentTables, len(batches), func(i int) error {
		return f(batches[i], i%residentTables)
	})
}

// ReserveApply allocates the memory that ApplyDelta needs for these chunks, so that ApplyDelta cannot run out of
// memory halfway.
func (d Deltas) ReserveApply(chunks []DeltaChunk) error {
	if err := checkDelta(chunks); err != nil {
		return err
	}
	most := 0
	batches := d.divideIntoBatches(len(chunks), func(i int) int { return len(chunks[i].Stored) })
	for _, batch := range batches {
		most = max(most, batch.bytes)
	}
	return d.On.reserve(most, len(batches))
}

// ApplyDelta XORs deltas into device memory, after the work that is queued on the caller's stream, and waits. Applying
// the same deltas again restores the memory. After an error it undoes its changes, unless the device is lost. It skips
// chunks without stored bytes.
func (d Deltas) ApplyDelta(on Order, chunks []DeltaChunk) error {
	if err := checkDelta(chunks); err != nil {
		return err
	}
	var mu sync.Mutex
	var doneBatches []deltaBatch
	err := runBatchesAtOnce(d.divideIntoBatches(len(chunks), func(i int) int {
		return len(chunks[i].Stored)
	}), func(batch deltaBatch, tableIndex int) error {
		err := d.applyDeltaBatch(on, tableIndex, chunks[batch.lo:batch.hi], batch.bytes)
		if err == nil {
			mu.Lock()
			defer mu.Unlock()
			doneBatches = append(doneBatches, batch)
		}
		return err
	})
	if err != nil {
		for _, batch := range doneBatches {
			if d.applyDeltaBatch(on, 0, chunks[batch.lo:batch.hi], batch.bytes) != nil {
				break
			}
		}
	}
	return err
}

func (d Deltas) applyDeltaBatch(on Order, tableIndex int, chunks []DeltaChunk, bytes int) error {
	return d.On.run(on, residentLaunch{
		kernel: residentDeltaApply, tableIndex: tableIndex, grid: deltaGrid(len(chunks)),
		block: C.OW_DELTA_THREADS, bytes: bytes,
		fill: func(table unsafe.Pointer, dev uint64) {
			rows, at := unsafe.Slice((*C.ow_delta_row)(table), len(chunks)), len(chunks)*deltaRow
			offsets := make([]int, len(chunks))
			for i := range chunks {
				offsets[i] = at
				rows[i] = chunks[i].kernelRow(dev + uint64(at))
				at += len(chunks[i].Stored)
			}
			callOnAllCores(len(chunks), 64, func(i int) {
				copy(unsafe.Slice((*byte)(unsafe.Add(table, offsets[i])), len(chunks[i].Stored)), chunks[i].Stored)
			})
		},
		args: func(table uint64) []uint64 { return []uint64{table, uint64(len(chunks))} },
	})
}

func deltaGrid(rows int) int {
	const warps = C.OW_DELTA_THREADS / 32
	return (rows + warps - 1) / warps
}

// callOnAllCores calls f(0) to f(n-1) on all cores, `step` calls at a time.
func callOnAllCores(n, step int, f func(i int)) {
	_ = spawn.Each(context.Background(), "cuda delta", runtime.GOMAXPROCS(0), (n+step-1)/step, func(k int) error {
		for i := k * step; i < min(n, (k+1)*step); i++ {
			f(i)
		}
		return nil
	})
}

// EncodeDelta sets Stored of each chunk to the delta from Base to Now, or to nil if they are equal, after the work that
// is queued on the caller's stream. The deltas are those of delta.Encode. progress is called with the size of each
// chunk.
func (d Deltas) EncodeDelta(ctx context.Context, on Order, chunks []DeltaChunk, progress func(n int64)) error {
	for i := range chunks {
		chunks[i].Stored = nil
	}
	if err := checkDelta(chunks); err != nil {
		return err
	}
	const most = 1 << 16 // rows per call: 16 GiB of tensors in chunks of 256 KiB
	for len(chunks) > 0 {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		n := min(most, len(chunks))
		if err := d.encodeDelta(on, chunks[:n]); err != nil {
			return err
		}
		for i := range chunks[:n] {
			progress(int64(chunks[i].Bytes))
		}
		chunks = chunks[n:]
	}
	return nil
}

func (d Deltas) encodeDelta(on Order, chunks []DeltaChunk) error {
	rows := make([]C.ow_delta_row, len(chunks))
	for i := range rows {
		rows[i] = chunks[i].kernelRow(0)
	}
	err := d.On.run(on, residentLaunch{
		kernel: residentDeltaMeasure, grid: deltaGrid(len(rows)), block: C.OW_DELTA_THREADS,
		bytes: deltaRow * len(rows), back: deltaRow * len(rows),
		fill: func(table unsafe.Pointer, _ uint64) { memory.CopyTable(table, 0, rows) },
		args: func(table uint64) []uint64 { return []uint64{table, uint64(len(rows))} },
		take: func(answers unsafe.Pointer) { copy(rows, unsafe.Slice((*C.ow_delta_row)(answers), len(rows))) },
	})
	if err != nil {
		return err
	}
	var some []int // chunks that have changed
	for i := range rows {
		if rows[i].stored > 0 {
			some = append(some, i)
		}
	}
	return runBatchesAtOnce(d.divideIntoBatches(len(some), func(k int) int {
		return int(rows[some[k]].stored)
	}), func(batch deltaBatch, tableIndex int) error {
		return d.writeDeltaBatch(on, tableIndex, chunks, rows, some[batch.lo:batch.hi], batch.bytes)
	})
}

// writeDeltaBatch writes the deltas of chunks after their rows have been measured.
func (d Deltas) writeDeltaBatch(on Order, tableIndex int, chunks []DeltaChunk, rows []C.ow_delta_row, some []int,
	bytes int) error {
	head := deltaRow * len(some)
	return d.On.run(on, residentLaunch{
		kernel: residentDeltaWrite, tableIndex: tableIndex, grid: deltaGrid(len(some)),
		block: C.OW_DELTA_THREADS, bytes: head, room: bytes, back: bytes - head, backAt: head,
		fill: func(table unsafe.Pointer, dev uint64) {
			out, at := unsafe.Slice((*C.ow_delta_row)(table), len(some)), uint64(head)
			for k, i := range some {
				out[k] = rows[i]
				out[k].at = C.uint64_t(dev + at)
				at += uint64(rows[i].stored)
			}
		},
		args: func(table uint64) []uint64 { return []uint64{table, uint64(len(some))} },
		take: func(answers unsafe.Pointer) {
			all, at := make([]byte, bytes-head), 0
			for _, i := range some {
				n := int(rows[i].stored)
				chunks[i].Stored = all[at : at+n : at+n]
				at += n
			}
			const part = 256 << 10
			from := unsafe.Slice((*byte)(answers), len(all))
			callOnAllCores((len(all)+part-1)/part, 1, func(k int) {
				lo, hi := k*part, min(len(all), (k+1)*part)
				copy(all[lo:hi], from[lo:hi])
			})
		},
	})
}
