package main

// This file measures loads over HTTP, beside what TCP carries.

import (
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/measure"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/serve"
)

const (
	netPlain      = "net-plain.safetensors"
	netCompressed = "net.safetensors"
	netMost       = 1 << 30 // tensor bytes: few, since a slow link needs time
)

// measureNet measures loads over HTTP from a server in this process, so that both ends
// share the cores: over shaped links, and over the bare loopback beside the rate of
// TCP alone.
func (r *run) measureNet() error {
	in, total, err := r.Make("llama-bf16", min(r.Size, netMost), 2)
	if err != nil {
		return err
	}
	for name, compress := range map[string]bool{netPlain: false, netCompressed: true} {
		if _, err := save.Write(r.Ctx, r.Job, save.Spec{Path: r.Path(name), Compress: compress, Threads: r.Threads},
			in); err != nil {
			return err
		}
	}
	for _, link := range []struct {
		name       string
		rate, each float64 // GB/s; 0: the rate of TCP
	}{
		{"link of 0.3 GB/s", 0.3, 0}, {"link of 1.25 GB/s", 1.25, 0}, {"link of 5 GB/s", 5, 0},
		{"1.25 GB/s, 0.04 a connection", 1.25, 0.04},
		{"bare loopback", 0, 0},
	} {
		err := func() error {
			s, err := serve.New(r.Folder, serve.Options{Rate: int64(link.rate * 1e9), Each: int64(link.each * 1e9)})
			if err != nil {
				return err
			}
			defer s.Close()
			floor, floorName := link.rate, "the link"
			if floor == 0 {
				floorName = "raw TCP into fresh memory, plain bytes"
				if floor, err = r.bestTCP(r.Path(netPlain), []int{1, 2, 4, 8}, measure.Fresh); err != nil {
					return err
				}
			}
			for _, x := range []struct {
				what, file string
				goal       float64
			}{{"plain", netPlain, 0.97}, {"compressed bf16", netCompressed, 1.45}} {
				row := measure.Row{Group: "net", Name: fmt.Sprintf("%s over HTTP, %s", x.what, link.name), Unit: "GB/s",
					Floor: floor, FloorName: floorName}
				if link.rate == 0 {
					x.goal = 0.85
				}
				if err := r.Same(s.URL()+x.file, in); err != nil {
					return err
				}
				seconds, err := r.MedianOf(func() (float64, error) { return r.arrivalTime(s.URL() + x.file) })
				if err != nil {
					return err
				}
				row.Value = measure.Rate(total, seconds)
				if link.rate == 0 && x.file == netCompressed {
					seconds, err := r.MedianOf(func() (float64, error) { return r.arrivalTime(r.Path(x.file)) })
					if err != nil {
						return err
					}
					row.Floor, row.FloorName = measure.Rate(total, seconds), "the same file from the page cache"
				}
				if link.each == 0 && (link.rate != 0 || x.file == netPlain) {
					row.Goal, row.Reached = fmt.Sprintf("%.2f of it", x.goal), atLeast(row.Value/floor, x.goal)
				}
				r.Add(row)
			}
			return nil
		}()
		if err != nil {
			return err
		}
	}
	return r.firstTensor()
}

// arrivalTime is the time from opening a model until all of it has landed.
func (r *run) arrivalTime(uri string) (seconds float64, err error) {
	start := time.Now()
	err = r.Loaded(uri, load.Options{}, func(*load.Model, [][]byte) error {
		seconds = time.Since(start).Seconds()
		return nil
	})
	return seconds, err
}

// firstTensor measures the time for one small tensor over a link with latency.
func (r *run) firstTensor() error {
	const latency = 20 * time.Millisecond
	s, err := serve.New(r.Folder, serve.Options{Latency: latency})
	if err != nil {
		return err
	}
	defer s.Close()
	seconds, err := r.Median(func() error {
		m, err := load.Open(r.Ctx, load.Spec{URIs: []string{s.URL() + netCompressed}})
		if err != nil {
			return err
		}
		defer m.Close()
		small := 0
		for i, t := range m.Index().Tensors {
			if b := m.Index().Tensors[small].Bytes; t.Bytes > 0 && (t.Bytes < b || b == 0) {
				small = i
			}
		}
		mem, err := m.LoadWhole(r.Ctx, []int{small}, load.Options{})
		cpu.Release(mem)
		return err
	})
	if err != nil {
		return err
	}
	r.Add(measure.Row{Group: "net", Name: "open over HTTP and load one small tensor, 20 ms an answer",
		Value: seconds * 1e3, Unit: "ms",
		Floor: 2 * latency.Seconds() * 1e3, FloorName: "two answers", Note: "a header, then a range"})
	return nil
}

// bestTCP is the rate of connections whose bytes are not processed: sendfile at one
// end, reads into the memory that room returns at the other; nil keeps one buffer a
// connection, as a ring does. The best of several numbers of connections.
func (r *run) bestTCP(path string, conns []int, room func(int64, func([]byte) error) error) (float64, error) {
	st, err := os.Stat(path)
	if err != nil {
		return 0, errs.FromOS(err)
	}
	size := st.Size()
	if room == nil {
		room = func(_ int64, fn func([]byte) error) error { return fn(nil) }
	}
	best := 0.0
	for _, n := range conns {
		seconds, err := r.MedianOf(func() (s float64, err error) {
			err = room(size, func(m []byte) error {
				s, err = measure.Timed(func() error { return rawOnce(path, m, size, n) })
				return err
			})
			return s, err
		})
		if err != nil {
			return 0, err
		}
		best = max(best, measure.Rate(size, seconds))
	}
	return best, nil
}

func rawOnce(path string, m []byte, size int64, conns int) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return errs.New(errs.ErrIO, "%v", err)
	}
	var sending sync.WaitGroup
	defer sending.Wait()
	defer l.Close()
	spawn.GoFor(&sending, "bench tcp", func() { sendAll(l, []string{path}, &sending) })
	part := (size + int64(conns) - 1) / int64(conns)
	return measure.Parallel(conns, size, part, func(_ int, lo, hi int64) error {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			return errs.New(errs.ErrIO, "%v", err)
		}
		defer c.Close()
		// Which bytes this connection reads does not matter: all are alike.
		step := make([]byte, 1<<20)
		for at := lo; at < hi; {
			b := step
			if m != nil {
				b = m[at:min(hi, at+4<<20)]
			}
			n, err := c.Read(b[:min(int64(len(b)), hi-at)])
			if at += int64(n); err != nil {
				return errs.New(errs.ErrIO, "%v", err)
			}
		}
		return nil
	})
}
