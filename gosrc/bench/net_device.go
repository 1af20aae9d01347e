package bench

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
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/serve"
	"github.com/overwire/overwire/gosrc/tensor"
)

// netDevice measures loads to the device over HTTP, in processes of their own,
// from a server in this one, beside what TCP alone carries between the two ends
// of the loopback into memory that is there already.
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
	r.add(Row{Group: "net", Name: "raw TCP over the loopback, nobody looks at the bytes", Value: tcp, Unit: "GB/s"})
	floor, name := tcp, "raw TCP"
	if r.gpu != nil {
		if floor, err = r.bestSlots(m.files[plain], []int{8, 16, 32}); err != nil {
			return err
		}
		name = "raw TCP to the device"
		r.add(Row{Group: "net", Name: "raw TCP into the pinned slots of a load, and on to the device", Value: floor, Unit: "GB/s",
			Floor: tcp, FloorName: "raw TCP", Note: "nobody looks at the bytes"})
	}
	urls := map[variant][]string{}
	for v, files := range m.files {
		for _, f := range files {
			urls[v] = append(urls[v], s.URL()+string(v)+"/"+filepath.Base(f))
		}
	}
	variants := []variant{packed, plain}
	var tasks []task
	for _, v := range variants {
		tasks = append(tasks, task{"verify " + string(v), v, append([]string{"verify", r.opt.Device, m.sums}, urls[v]...)})
	}
	for range r.opt.Repeat {
		for _, v := range variants {
			tasks = append(tasks, task{string(v), v, append([]string{"load", r.opt.Device}, urls[v]...)})
		}
	}
	all := r.taskTurns(m, tasks, nil)
	for _, v := range variants {
		o := all[string(v)]
		for _, err := range []error{all["verify "+string(v)].err, o.err} {
			if err != nil {
				r.step("net", m.name(v)+" over HTTP", func() error { return err })
			}
		}
		if len(o.results) == 0 || all["verify "+string(v)].err != nil {
			continue
		}
		for _, w := range whichLoad {
			row := Row{Group: "net", Name: fmt.Sprintf("%s over HTTP: %s", m.name(v), w.name), Unit: "GB/s"}
			o.spread(&row, func(res deviceResult) float64 { return rate(res.Bytes, w.of(res)) })
			row.Floor, row.FloorName = floor, name
			if v == packed {
				row.Floor, row.FloorName = floor/m.ratio, fmt.Sprintf("%s / %.3f", name, m.ratio)
				r.goal(&row, ">= 40 GB/s, or 0.85 of it", atLeast(row.Value, min(40, 0.85*row.Floor)))
			} else {
				r.goal(&row, ">= 0.85 of it", atLeast(row.Value, 0.85*row.Floor))
			}
			if w.name == "second load" {
				row.Note += "; " + waits(o.results)
			}
			r.add(row)
		}
	}
	return nil
}

// waits says what the workers of the last of some loads were at, on average.
func waits(results []deviceResult) string {
	st := results[len(results)-1].Stages
	if st.Workers == 0 || st.WallNS == 0 {
		return "no stages"
	}
	text := fmt.Sprintf("%d workers in %.0f ms:", st.Workers, float64(st.WallNS)/1e6)
	for _, x := range []struct {
		name string
		ns   int64
	}{{"a turn", st.TurnNS}, {"an answer", st.AnswerNS}, {"bytes", st.ReadNS}, {"checksums", st.CheckNS}, {"a slot", st.WaitNS}, {"handing over", st.DecodeNS}} {
		text += fmt.Sprintf(" %s %.0f %%,", x.name, 100*float64(x.ns)/float64(st.Workers*st.WallNS))
	}
	return text[:len(text)-1]
}

// bestSlots is what TCP and the wire carry one after the other: a lane as loads
// have it, whose slots connections fill, a part each, and which are copied to
// the device when they are full. The best of a few numbers of connections.
func (r *run) bestSlots(files []string, conns []int) (float64, error) {
	_, slot := cuda.Ring()
	lane, err := r.gpu.Lane(0, 0)
	if err != nil {
		return 0, err
	}
	defer func() { lane.Close(); _ = r.gpu.Trim() }()
	mem, err := r.gpu.Alloc([]int64{slot})
	if err != nil {
		return 0, err
	}
	defer mem[0].Release()
	total, err := sizeOf(files)
	if err != nil {
		return 0, err
	}
	total = max(slot, total/slot*slot)
	best := 0.0
	for _, n := range conns {
		seconds, err := r.median(func() error { return slotsOnce(r.ctx, lane, mem[0].Ptr, files, total, n) })
		if err != nil {
			return 0, err
		}
		best = max(best, rate(total, seconds))
	}
	return best, nil
}

// slotsOnce brings total bytes, whole slots, to dst, which has room for one.
// Every connection brings all files over and over, for as long as it is asked.
func slotsOnce(ctx context.Context, lane *cuda.Lane, dst unsafe.Pointer, files []string, total int64, conns int) error {
	const part = 1 << 20
	_, slot := cuda.Ring()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // no connection waits for a slot that another will not fill
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return fault.New(fault.ErrIO, "%v", err)
	}
	var senders sync.WaitGroup
	defer senders.Wait()
	defer l.Close()
	senders.Add(1)
	spawn.Go("bench tcp", func() {
		defer senders.Done()
		for n := 0; ; n++ {
			c, err := l.Accept()
			if err != nil {
				return
			}
			senders.Add(1)
			spawn.Go("bench tcp", func() {
				defer senders.Done()
				defer c.Close()
				for k := n; sent(c, files[k%len(files)]) == nil; k++ {
				}
			})
		}
	})
	type piece struct {
		mu   sync.Mutex
		slot *cuda.Slot
		left int64
	}
	parts := (slot + part - 1) / part
	pieces := make([]piece, total/slot)
	for i := range pieces {
		pieces[i].left = parts
	}
	var next atomic.Int64
	var bad atomic.Pointer[error]
	jobs := []device.Job{{Chunk: tensor.Chunk{Codec: tensor.CodecRaw, Stored: uint32(slot), Logical: uint32(slot)}, Dst: dst}}
	bring := func(c net.Conn) error {
		for i := next.Add(1) - 1; i < total/slot*parts; i = next.Add(1) - 1 {
			p, at := &pieces[i/parts], i%parts*part
			p.mu.Lock()
			var err error
			if p.slot == nil {
				p.slot, err = lane.Get(ctx)
			}
			s := p.slot
			p.mu.Unlock()
			if err != nil {
				return err
			}
			if _, err = io.ReadFull(c, s.Bytes[at:min(at+part, slot)]); err != nil {
				return fault.New(fault.ErrIO, "%v", err)
			}
			p.mu.Lock()
			p.left--
			full := p.left == 0
			p.mu.Unlock()
			if !full {
				continue
			}
			p.slot = nil
			err = lane.Submit(s, slot, jobs, func(_ int, err error) {
				if err != nil {
					bad.CompareAndSwap(nil, &err)
				}
			})
			if err != nil {
				return err
			}
		}
		return nil
	}
	err = parallel(conns, int64(conns), 1, func(int, int64, int64) error {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			return fault.New(fault.ErrIO, "%v", err)
		}
		defer c.Close()
		err = bring(c)
		if err != nil {
			cancel()
		}
		return err
	})
	for i := range pieces { // what an error left half filled
		if s := pieces[i].slot; s != nil {
			lane.Put(s)
		}
	}
	if e := lane.Drain(context.WithoutCancel(ctx)); err == nil {
		err = e
	}
	if p := bad.Load(); err == nil && p != nil {
		err = *p
	}
	return err
}

// sent writes a file to a connection.
func sent(c net.Conn, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(c, f)
	return err
}
