package cuda

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/internal/crc32c"
)

var (
	benchFlag = flag.Bool("cuda.bench", false, "run the benchmark; use with -test.run TestBench")
	benchDir  = flag.String("cuda.dir", os.TempDir(), "directory for the benchmark's file")
	benchMB   = flag.Int("cuda.mb", 16000, "MB of tensor bytes per measured run")
	benchRuns = flag.Int("cuda.runs", 5, "measured runs per case; the median is reported")
	fuzzFlag  = flag.Int("cuda.corrupt", 0, "number of corrupt chunks that TestManyCorrupt decodes")
)

// gb returns a rate in GB/s.
func gb(n int64, d time.Duration) float64 { return float64(n) / 1e9 / d.Seconds() }

// repeat measures fn several times and prints the median and the range.
func repeat(t *testing.T, what string, fn func() (int64, time.Duration)) {
	var all []float64
	for range *benchRuns {
		n, d := fn()
		all = append(all, gb(n, d))
	}
	slices.Sort(all)
	t.Logf("%-64s %7.2f GB/s (%.2f to %.2f)", what, all[len(all)/2], all[0], all[len(all)-1])
}

// full returns a piece of about n stored bytes of bf16 weights, in chunks of 1 MiB.
func full(r *rand.Rand, n int) *piece {
	var p piece
	data := weights(r, x16.BF16, 1<<20)
	var one piece
	one.coded(data, x16.BF16)
	for len(p.bytes)+len(one.bytes)+16 <= n {
		p.add(one.bytes, one.jobs[0].Chunk, nil, data)
	}
	for i := range p.jobs {
		j := &p.jobs[i]
		j.Chunk.Sum = crc32c.Sum(p.bytes[j.Src : j.Src+j.Chunk.Stored])
	}
	return &p
}

// flood submits a piece from several workers until total logical bytes have been written to dst. before is called with
// each slot before it is submitted.
func flood(t *testing.T, d *Device, l *queue.Queue, p *piece, dst device.Memory, total int64, workers int,
	before func(i int64, s *queue.Slot)) (int64, time.Duration) {
	each := int64(0)
	for i := range p.jobs {
		each += int64(p.jobs[i].Chunk.Logical)
	}
	pieces, room := max(1, total/each), dst.Bytes/each
	var next, bad atomic.Int64
	var wg sync.WaitGroup
	start := time.Now()
	for range workers {
		wg.Go(func() {
			for {
				i := next.Add(1) - 1
				if i >= pieces {
					return
				}
				s, err := l.Get(context.Background())
				if err != nil {
					t.Error(err)
					return
				}
				if before != nil {
					before(i, s.(*queue.Slot))
				}
				jobs := slices.Clone(p.jobs)
				at := i % room * each
				for k := range jobs {
					jobs[k].Dst = unsafe.Add(dst.Ptr, at)
					at += int64(jobs[k].Chunk.Logical)
				}
				if err := l.Submit(s, int64(len(p.bytes)), jobs, func(_ int, err error) {
					if err != nil {
						bad.Add(1)
					}
				}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if err := l.Drain(context.Background()); err != nil || bad.Load() > 0 {
		t.Fatalf("%v, %d bad jobs", err, bad.Load())
	}
	took := time.Since(start)
	// Check the last bytes before reporting the rate.
	n := min(room, pieces)
	got := make([]byte, n*each)
	if err := d.Read(got, device.Memory{Ptr: dst.Ptr, Bytes: n * each}); err != nil {
		t.Fatal(err)
	}
	for at := int64(0); at < n*each; {
		for k := range p.want {
			if !bytes.Equal(got[at:at+int64(len(p.want[k]))], p.want[k]) {
				t.Fatal("the bytes at the destination are wrong")
			}
			at += int64(len(p.want[k]))
		}
	}
	return pieces * each, took
}

// fill copies a piece to every slot of a queue.
func fill(t *testing.T, l *queue.Queue, p *piece) {
	var all []device.Slot
	for range l.CountFree() {
		s, err := l.Get(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		copy(s.Memory(), p.bytes)
		all = append(all, s)
	}
	for _, s := range all {
		l.Put(s)
	}
}

// TestBench measures the queue and its baseline in the same run.
func TestBench(t *testing.T) {
	if !*benchFlag {
		t.Skip("-cuda.bench")
	}
	r := rand.New(rand.NewPCG(1, 2))
	total := int64(*benchMB) * 1_000_000
	start := time.Now()
	d := begun(t)
	opened := time.Since(start)
	info, _ := driver.Info()
	t.Logf("%+v, %d cores, opened in %v", info, runtime.GOMAXPROCS(0), opened)
	for i := range 3 {
		start := time.Now()
		l, err := d.Queue(queue.DefaultSlots, queue.DefaultSlotBytes)
		if err != nil {
			t.Fatal(err)
		}
		took := time.Since(start)
		l.Close()
		t.Logf("queue %d ready in %v", i+1, took)
		if i == 1 {
			start = time.Now()
			if err := d.Trim(); err != nil {
				t.Fatal(err)
			}
			t.Logf("trimmed in %v; the next queue is a new one", time.Since(start))
		}
	}
	benchAlloc(t, d, total)
	mem, err := d.Alloc([]int64{min(total, 1<<30)})
	if err != nil {
		t.Fatal(err)
	}
	defer mem[0].Release()
	cores := runtime.GOMAXPROCS(0)
	for _, g := range []struct {
		slots int
		bytes int64
	}{{queue.DefaultSlots, queue.DefaultSlotBytes}, {26, 4 << 20}} {
		l, err := d.Queue(g.slots, g.bytes)
		if err != nil {
			t.Fatal(err)
		}
		name := fmt.Sprintf("%d x %.1f MiB: ", g.slots, float64(g.bytes)/(1<<20))
		repeat(t, name+"baseline, pinned copies", func() (int64, time.Duration) {
			count := max(1, int(total/g.bytes/2))
			took, err := l.MeasureLink(g.bytes, count)
			if err != nil {
				t.Fatal(err)
			}
			return int64(count) * g.bytes, took
		})
		p := full(r, int(g.bytes))
		ratio := float64(len(p.bytes)) / float64(len(p.jobs)<<20)
		fill(t, l, p)
		for _, w := range []int{1, 2} {
			repeat(t, fmt.Sprintf("%scoded, ratio %.3f, no reading, %d workers", name, ratio, w), func() (int64, time.Duration) {
				return flood(t, d, l, p, mem[0], total, w, nil)
			})
		}
		var rawp, smalls piece
		rawp.raw(weights(r, x16.BF16, int(g.bytes)))
		fill(t, l, &rawp)
		repeat(t, name+"raw, no reading, 1 worker", func() (int64, time.Duration) { return flood(t, d, l, &rawp, mem[0], total, 1, nil) })
		for len(smalls.bytes)+20_000 < int(g.bytes) {
			smalls.raw(rawp.bytes[len(smalls.bytes) : len(smalls.bytes)+1_000+2*r.IntN(9_000)])
		}
		fill(t, l, &smalls)
		repeat(t, fmt.Sprintf("%s%d small raw, 2 workers", name, len(smalls.jobs)), func() (int64, time.Duration) {
			return flood(t, d, l, &smalls, mem[0], total/4, 2, nil)
		})
		benchRead(t, d, l, p, mem[0], total, name, min(4, cores), min(8, cores), min(12, cores), cores)
		l.Close()
	}
}

// benchRead adds the work of a load: pieces are read from the page cache, and their checksums are compared.
func benchRead(t *testing.T, d *Device, l *queue.Queue, p *piece, dst device.Memory, total int64, name string,
	workers ...int) {
	const copies = 64
	f, err := os.Create(filepath.Join(*benchDir, "overwire-cuda-bench"))
	if err != nil {
		t.Fatal(err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	n := int64(len(p.bytes))
	workers = slices.Compact(workers)
	for range copies {
		if _, err := f.Write(p.bytes); err != nil {
			t.Fatal(err)
		}
	}
	for _, check := range []bool{false, true} {
		for _, w := range workers {
			what := fmt.Sprintf("%sread from cache, check %v, %d workers", name, check, w)
			repeat(t, what, func() (int64, time.Duration) {
				return flood(t, d, l, p, dst, total, w, func(i int64, s *queue.Slot) {
					if _, err := f.ReadAt(s.Memory()[:n], i%copies*n); err != nil {
						t.Error(err)
					}
					for k := range p.jobs {
						j := &p.jobs[k]
						if check && crc32c.Sum(s.Memory()[j.Src:j.Src+j.Chunk.Stored]) != j.Chunk.Sum {
							t.Error("checksum")
						}
					}
				})
			})
		}
	}
}

// benchAlloc measures the time to allocate whole models.
func benchAlloc(t *testing.T, d *Device, total int64) {
	models := map[string][]int64{"291 tensors": nil, "18867 tensors": nil}
	for i := range 291 {
		n := int64(58_720_256) * 2
		if i%3 == 0 {
			n = 8192
		}
		models["291 tensors"] = append(models["291 tensors"], min(n, total/200))
	}
	r := rand.New(rand.NewPCG(3, 4))
	for range 18867 {
		models["18867 tensors"] = append(models["18867 tensors"], min(1+r.Int64N(1_350_000), total/40_000))
	}
	for name, sizes := range models {
		for range 2 {
			sum := int64(0)
			for _, n := range sizes {
				sum += n
			}
			before, _, _ := d.MemoryInfo()
			start := time.Now()
			mem, err := d.Alloc(sizes)
			if err != nil {
				t.Fatal(err)
			}
			took := time.Since(start)
			after, _, _ := d.MemoryInfo()
			for _, m := range mem {
				m.Release()
			}
			start = time.Now()
			if err := d.Reap(true); err != nil {
				t.Fatal(err)
			}
			t.Logf("%s, %.2f GB: allocated in %v with %.1f MB overhead; freed in %v", name, float64(sum)/1e9, took,
				float64(before-after-sum)/1e6, time.Since(start))
		}
	}
}

// TestManyCorrupt decodes very many corrupt chunks, several per piece, between valid chunks whose bytes must not
// change.
func TestManyCorrupt(t *testing.T) {
	if *fuzzFlag == 0 {
		t.Skip("set -cuda.corrupt N to run this test")
	}
	r := random(t)
	d, l := open(t, 2, 4<<20)
	var chunks []piece
	for tr := uint8(x16.BF16); tr <= x16.Bytes; tr++ {
		var p piece
		if p.coded(weights(r, tr, 3000), tr) {
			chunks = append(chunks, p)
		}
	}
	refused, passed := 0, 0
	for done := 0; done < *fuzzFlag; {
		var p piece
		for range 512 {
			one := chunks[r.IntN(len(chunks))]
			b := bytes.Clone(one.bytes)
			for range 1 + r.IntN(3) {
				i := r.IntN(len(b))
				b[i] ^= byte(1 << r.IntN(8))
			}
			p.add(b, one.jobs[0].Chunk, nil, nil)
			done++
			if done%16 == 0 {
				p.add(one.bytes, one.jobs[0].Chunk, nil, one.want[0])
			}
		}
		for _, err := range p.run(t, d, l, 0) {
			if err != nil {
				refused++
			} else {
				passed++
			}
		}
		if t.Failed() {
			return
		}
	}
	t.Logf("%d rejected, %d passed (valid, or with changed bits that only the checksum covers)", refused, passed)
}

// TestManyLoads opens and closes queues and memory a thousand times. At the end, the device must have as much free
// memory as after the first ten times.
func TestManyLoads(t *testing.T) {
	r := random(t)
	d := begun(t)
	var p piece
	p.coded(weights(r, x16.BF16, 20_000), x16.BF16)
	p.raw(weights(r, x16.BF16, 20_000))
	rounds := 1000
	if testing.Short() || fakes {
		rounds = 50
	}
	var first int64
	for i := range rounds {
		l, err := d.Queue(2, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		p.run(t, d, l, int64(i%2))
		l.Close()
		if i%100 == 99 {
			if err := d.Trim(); err != nil {
				t.Fatal(err)
			}
		}
		if i != 9 && i != rounds-1 {
			continue
		}
		if err := d.Trim(); err != nil {
			t.Fatal(err)
		}
		unused, _, err := d.MemoryInfo()
		if err != nil {
			t.Fatal(err)
		}
		if i == 9 {
			first = unused
		} else if first-unused > 8<<20 { // other processes may use the device
			t.Errorf("%d bytes were free after 10 loads, %d after %d", first, unused, rounds)
		}
	}
}
