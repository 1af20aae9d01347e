package main

// This file measures loads over HTTP to a device.

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/measure"
	"github.com/overwire/overwire/gosrc/serve"
	"github.com/overwire/overwire/gosrc/tensor"
)

// netDevice measures loads to the device over HTTP, from a server in this process, beside the rate of TCP alone
// over the loopback into memory that is touched already.
func (r *run) netDevice(m *model) error {
	dir := filepath.Dir(filepath.Dir(m.files[plain][0]))
	s, err := serve.New(dir, serve.Options{})
	if err != nil {
		return err
	}
	defer s.Close()
	tcp, err := r.bestTCP(m.files[plain][0], []int{4, 8, 16, 32}, nil)
	if err != nil {
		return err
	}
	r.Add(measure.Row{Group: "net", Name: "raw TCP over the loopback, bytes discarded", Value: tcp, Unit: "GB/s"})
	floor, name := tcp, "raw TCP"
	if r.gpu != nil {
		if floor, err = r.bestSlots(m.files[plain], []int{8, 16, 32}); err != nil {
			return err
		}
		name = "raw TCP to the device"
		r.Add(measure.Row{Group: "net", Name: "raw TCP into the pinned slots of a load, and on to the device",
			Value: floor, Unit: "GB/s",
			Floor: tcp, FloorName: "raw TCP", Note: "bytes are not processed"})
	}
	urls := map[variant][]string{}
	for v, files := range m.files {
		for _, f := range files {
			urls[v] = append(urls[v], s.URL()+string(v)+"/"+filepath.Base(f))
		}
	}
	for _, v := range []variant{packed, plain} {
		r.runStep("net", m.name(v)+" over HTTP", func() error {
			if err := r.compareModel(m, urls[v]); err != nil {
				return err
			}
			row := measure.Row{Group: "net", Name: m.name(v) + " over HTTP", Unit: "GB/s"}
			if err := r.timeLoads(&row, m, urls[v]); err != nil {
				return err
			}
			row.Floor, row.FloorName = floor, name
			if v == packed {
				row.Floor, row.FloorName = floor/m.ratio, fmt.Sprintf("%s / %.3f", name, m.ratio)
				r.goal(&row, ">= 40 GB/s, or 0.85 of it", atLeast(row.Value, min(40, 0.85*row.Floor)))
			} else {
				r.goal(&row, ">= 0.85 of it", atLeast(row.Value, 0.85*row.Floor))
			}
			r.Add(row)
			return nil
		})
	}
	return nil
}

// bestSlots is the rate of TCP and the link one after the other: a queue as loads
// use it, whose slots are filled by several connections together, and copied to the
// device when they are full. The best of several numbers of connections.
func (r *run) bestSlots(files []string, conns []int) (float64, error) {
	_, slot := cuda.Ring()
	queue, err := r.gpu.Queue(0, 0)
	if err != nil {
		return 0, err
	}
	defer func() { queue.Close(); _ = r.gpu.Trim() }()
	mem, err := r.gpu.Alloc([]int64{slot})
	if err != nil {
		return 0, err
	}
	defer mem[0].Release()
	var total int64
	for _, name := range files {
		info, err := os.Stat(name)
		if err != nil {
			return 0, errs.FromOS(err)
		}
		total += info.Size()
	}
	total = max(slot, total/slot*slot)
	best := 0.0
	for _, n := range conns {
		seconds, err := r.Median(func() error { return slotsOnce(r.Ctx, queue, mem[0].Ptr, files, total, n) })
		if err != nil {
			return 0, err
		}
		best = max(best, measure.Rate(total, seconds))
	}
	return best, nil
}

// slotsOnce reads total bytes, whole slots, and copies each slot to dst, which has
// space for one. Every connection sends all files again and again until its
// receiver has enough.
func slotsOnce(ctx context.Context, queue *cuda.Queue, dst unsafe.Pointer, files []string, total int64,
	conns int) error {
	_, slot := cuda.Ring()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // no connection waits for a slot that another will not fill
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return errs.New(errs.ErrIO, "%v", err)
	}
	var sending sync.WaitGroup
	defer sending.Wait()
	defer l.Close()
	sending.Add(1)
	spawn.Go("bench tcp", func() { defer sending.Done(); sendAll(l, files, &sending) })
	f := &filling{queue: queue, slot: slot, pieces: make([]shared, total/slot),
		tasks: []device.DecodeTask{{Chunk: tensor.Chunk{Codec: tensor.CodecRaw, Stored: uint32(slot),
			Logical: uint32(slot)}, Dst: dst}}}
	err = measure.Parallel(conns, int64(conns), 1, func(int, int64, int64) error {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			return errs.New(errs.ErrIO, "%v", err)
		}
		defer c.Close()
		err = f.bringShares(ctx, c)
		if err != nil {
			cancel()
		}
		return err
	})
	for i := range f.pieces { // slots that an error left half filled
		if s := f.pieces[i].slot; s != nil {
			queue.Put(s)
		}
	}
	if e := queue.Drain(context.WithoutCancel(ctx)); err == nil {
		err = e
	}
	if p := f.bad.Load(); err == nil && p != nil {
		err = *p
	}
	return err
}

// sendAll sends files over every connection until its receiver has enough.
func sendAll(l net.Listener, files []string, sending *sync.WaitGroup) {
	for n := 0; ; n++ {
		c, err := l.Accept()
		if err != nil {
			return
		}
		sending.Add(1)
		spawn.Go("bench tcp", func() {
			defer sending.Done()
			defer c.Close()
			for k := n; sendFile(c, files[k%len(files)]) == nil; k++ {
			}
		})
	}
}

// shareBytes is how much of a slot a connection reads at a time.
const shareBytes = 1 << 20

// A filling is the slots that connections fill together, a share each.
type filling struct {
	queue  *cuda.Queue
	slot   int64
	tasks  []device.DecodeTask // of every slot: the destination of its bytes
	pieces []shared
	next   atomic.Int64 // share of all pieces
	bad    atomic.Pointer[error]
}

// shared is one slot; done counts the shares that have arrived.
type shared struct {
	mu   sync.Mutex
	slot device.Slot
	done int64
}

// bringShares reads shares from one connection until all are taken.
func (f *filling) bringShares(ctx context.Context, c net.Conn) error {
	shares := (f.slot + shareBytes - 1) / shareBytes
	for i := f.next.Add(1) - 1; i < int64(len(f.pieces))*shares; i = f.next.Add(1) - 1 {
		p, at := &f.pieces[i/shares], i%shares*shareBytes
		p.mu.Lock()
		var err error
		if p.slot == nil {
			p.slot, err = f.queue.Get(ctx)
		}
		s := p.slot
		p.mu.Unlock()
		if err != nil {
			return err
		}
		if _, err = io.ReadFull(c, s.Memory()[at:min(at+shareBytes, f.slot)]); err != nil {
			return errs.New(errs.ErrIO, "%v", err)
		}
		p.mu.Lock()
		p.done++
		full := p.done == shares
		p.mu.Unlock()
		if !full {
			continue
		}
		p.slot = nil
		if err := f.queue.Submit(s, f.slot, f.tasks, func(_ int, err error) {
			if err != nil {
				f.bad.CompareAndSwap(nil, &err)
			}
		}); err != nil {
			return err
		}
	}
	return nil
}

// sendFile writes a file to a connection.
func sendFile(c net.Conn, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(c, f)
	return err
}
