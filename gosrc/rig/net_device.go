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
				r.setGoal(&row, ">= 40 GB/s, or 0.85 of it", atLeast(row.Value, min(40, 0.85*row.Floor)))
			} else {
				r.setGoal(&row, ">= 0.85 of it", atLeast(row.Value, 0.85*row.Floor))
			}
			r.Add(row)
			return nil
		})
	}
	return nil
}

// bestSlots is the rate of TCP and the link one after the other: a queue as loads
// use it, whose slots several connections fill, a slot each, and which are copied to the
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
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return errs.New(errs.ErrIO, "%v", err)
	}
	var sending sync.WaitGroup
	defer sending.Wait()
	defer l.Close()
	spawn.GoFor(&sending, "bench tcp", func() { sendAll(l, files, &sending) })
	tasks := []device.DecodeTask{{Chunk: tensor.Chunk{Codec: tensor.CodecRaw, Stored: uint32(slot),
		Logical: uint32(slot)}, Dst: dst}}
	var bad atomic.Pointer[error]
	receivers := make([]net.Conn, conns)
	err = measure.Parallel(conns, total/slot, 1, func(n int, _, _ int64) (err error) {
		if receivers[n] == nil {
			if receivers[n], err = net.Dial("tcp", l.Addr().String()); err != nil {
				return errs.New(errs.ErrIO, "%v", err)
			}
		}
		s, err := queue.Get(ctx)
		if err != nil {
			return err
		}
		if _, err := io.ReadFull(receivers[n], s.Memory()[:slot]); err != nil {
			queue.Put(s)
			return errs.New(errs.ErrIO, "%v", err)
		}
		return queue.Submit(s, slot, tasks, func(_ int, err error) {
			if err != nil {
				bad.CompareAndSwap(nil, &err)
			}
		})
	})
	for _, c := range receivers {
		if c != nil {
			_ = c.Close()
		}
	}
	if e := queue.Drain(context.WithoutCancel(ctx)); err == nil {
		err = e
	}
	if p := bad.Load(); err == nil && p != nil {
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
		spawn.GoFor(sending, "bench tcp", func() {
			defer c.Close()
			for k := n; sendFile(c, files[k%len(files)]) == nil; k++ {
			}
		})
	}
}

func sendFile(c net.Conn, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(c, f)
	return err
}
