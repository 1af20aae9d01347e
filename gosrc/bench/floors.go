package bench

// This file measures the machine without overwire, and reads files to a GPU without decoding, as a baseline.

import (
	"cmp"
	"context"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// Floors are the machine's rates without overwire, in GB/s. They limit overwire's rates.
type Floors struct {
	CopyOne  float64 `json:"memcpy_one_core"`          // memory to memory, both already mapped
	CopyAll  float64 `json:"memcpy_all_cores"`         //
	ReadOne  float64 `json:"pread_one_core"`           // page cache to a buffer that stays in the CPU cache
	ReadAll  float64 `json:"pread_all_cores"`          //
	FaultOne float64 `json:"page_faults_one_core"`     // first touch of fresh huge pages
	FaultAll float64 `json:"page_faults_all_cores"`    //
	RawCopy  float64 `json:"pread_to_fresh_all_cores"` // page cache to fresh memory, like a load without decoding
}

// mapFresh maps memory as the CPU device does, calls fn with it, and unmaps it.
func mapFresh(n int64, fn func([]byte) error) error {
	p, length, err := cpu.Map(n)
	if err != nil {
		return err
	}
	defer cpu.Unmap(p, length)
	return fn(unsafe.Slice((*byte)(p), n))
}

// limits measures what the machine does without overwire.
type limits struct {
	*timer
	threads int
	bytes   int64  // size of the memory and of the file; exceeds every cache, unless the whole run is tiny
	path    string // a file to write
}

// measure measures all floors.
func (l *limits) measure() (f Floors, err error) {
	threads, floorBytes := l.threads, l.bytes
	err = mapFresh(floorBytes, func(src []byte) error {
		return mapFresh(floorBytes, func(dst []byte) (err error) {
			touchPages(src)
			touchPages(dst)
			if f.CopyOne, err = l.medianRate(floorBytes, func() error { copy(dst, src); return nil }); err != nil {
				return err
			}
			f.CopyAll, err = l.medianRate(floorBytes, func() error {
				return runParallel(threads, floorBytes, 8<<20, func(_ int, lo, hi int64) error {
					copy(dst[lo:hi], src[lo:hi])
					return nil
				})
			})
			return err
		})
	})
	if err != nil {
		return f, err
	}
	file, err := l.writeCachedFile()
	if err != nil {
		return f, err
	}
	defer file.Close()
	for _, c := range []struct {
		threads                int
		read, fault, rawResult *float64
	}{{1, &f.ReadOne, &f.FaultOne, nil}, {threads, &f.ReadAll, &f.FaultAll, &f.RawCopy}} {
		const piece = 1 << 20
		bufs := make([][]byte, c.threads)
		for i := range bufs {
			bufs[i] = make([]byte, piece)
		}
		if *c.read, err = l.medianRate(floorBytes, func() error {
			return runParallel(c.threads, floorBytes, piece, func(w int, lo, hi int64) error {
				return readAt(file, bufs[w][:hi-lo], lo)
			})
		}); err != nil {
			return f, err
		}
		if *c.fault, err = l.freshSpeed(func(m []byte) error {
			return runParallel(c.threads, floorBytes, 8<<20, func(_ int, lo, hi int64) error {
				touchPages(m[lo:hi])
				return nil
			})
		}); err != nil {
			return f, err
		}
		if c.rawResult == nil {
			continue
		}
		if *c.rawResult, err = l.freshSpeed(func(m []byte) error {
			return runParallel(c.threads, floorBytes, piece, func(_ int, lo, hi int64) error {
				return readAt(file, m[lo:hi], lo)
			})
		}); err != nil {
			return f, err
		}
	}
	return f, nil
}

// freshSpeed is like medianRate, with memory that fn is the first to touch. Mapping and unmapping are not timed.
func (l *limits) freshSpeed(fn func([]byte) error) (float64, error) {
	s, err := l.medianOf(func() (s float64, err error) {
		err = mapFresh(l.bytes, func(m []byte) error {
			s, err = timeOf(func() error { return fn(m) })
			return err
		})
		return s, err
	})
	if err != nil {
		return 0, err
	}
	return rateOf(l.bytes, s), nil
}

// writeCachedFile writes the file and leaves its pages in the page cache.
func (l *limits) writeCachedFile() (*os.File, error) {
	file, err := os.Create(l.path)
	if err != nil {
		return nil, errs.New(errs.ErrIO, "%v", err)
	}
	buf := make([]byte, 8<<20)
	for i := range buf {
		buf[i] = byte(i * 7)
	}
	for n := int64(0); n < l.bytes && err == nil; n += int64(len(buf)) {
		_, err = file.Write(buf)
	}
	if err != nil {
		file.Close()
		return nil, errs.New(errs.ErrIO, "%v", err)
	}
	return file, nil
}

func readAt(f *os.File, p []byte, off int64) error {
	if _, err := f.ReadAt(p, off); err != nil {
		return errs.New(errs.ErrIO, "%v", err)
	}
	return nil
}

// touchPages writes one byte to every page.
func touchPages(m []byte) {
	for i := 0; i < len(m); i += 4096 {
		m[i] = 1
	}
}

// runParallel divides [0, n) into steps for several workers. It returns the first error.
func runParallel(workers int, n, step int64, fn func(worker int, lo, hi int64) error) error {
	var next atomic.Int64
	var first atomic.Pointer[error]
	spawn.Workers("measure", workers, func(err error) { first.CompareAndSwap(nil, &err) }, func(w int) error {
		for lo := next.Add(step) - step; lo < n && first.Load() == nil; lo = next.Add(step) - step {
			if err := fn(w, lo, min(n, lo+step)); err != nil {
				return err
			}
		}
		return nil
	})
	if p := first.Load(); p != nil {
		return *p
	}
	return nil
}

// cpuName returns the kernel's name for the processor.
func cpuName() string {
	b, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(b)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}

// hugePagesSetting returns the kernel's setting for transparent huge pages, such as "madvise".
func hugePagesSetting() string {
	b, err := os.ReadFile("/sys/kernel/mm/transparent_hugepage/enabled")
	if err != nil {
		return "unknown"
	}
	_, rest, _ := strings.Cut(string(b), "[")
	word, _, _ := strings.Cut(rest, "]")
	return word
}

// A Reading reads the bytes [Lo, Hi) of a file. Each thread reads Step bytes into one of its slots, and copies
// them to the GPU on that slot's stream. The caller owns the memory.
type Reading struct {
	Path    string
	Lo, Hi  int64
	GPU     int    // device number, or -1 for the host
	To      uint64 // destination address on that device
	Slots   uint64 // for a GPU, the address of pinned memory with Each steps per thread
	Threads int
	Step    int64 // bytes per read; 0 means ReadStep
	Each    int   // slots per thread; 0 means SlotsEach
}

const (
	// ReadStep fits in a core's L2 cache. With smaller steps, calls take more time than the cache saves: 1 MiB reaches
	// only three quarters of this rate.
	ReadStep = 2 << 20
	// SlotsEach lets a thread read while its previous steps are copied to the GPU.
	SlotsEach = 3
)

// Run reads the range and returns when all bytes are at To.
func (r Reading) Run(ctx context.Context) error {
	if r.Lo < 0 || r.Hi < r.Lo || r.Threads < 1 || r.Threads > 1024 || r.To == 0 || r.GPU >= 0 && r.Slots == 0 {
		return errs.New(errs.ErrArgument, "baseline: invalid range [%d, %d) or number of threads %d", r.Lo,
			r.Hi, r.Threads)
	}
	step, each := cmp.Or(r.Step, ReadStep), cmp.Or(r.Each, SlotsEach)
	file, err := os.Open(r.Path)
	if err != nil {
		return errs.FromOS(err)
	}
	defer file.Close()
	if r.GPU < 0 {
		return runParallel(r.Threads, r.Hi-r.Lo, step, func(_ int, lo, hi int64) error {
			if err := ctx.Err(); err != nil {
				return errs.Cause(ctx)
			}
			return readAt(file, unsafe.Slice((*byte)(device.Pointer(uintptr(r.To)+uintptr(lo))), hi-lo), r.Lo+lo)
		})
	}
	gpu, err := cuda.Open(r.GPU)
	if err != nil {
		return err
	}
	streams := make([]uintptr, r.Threads*each)
	defer func() {
		for _, s := range streams {
			if s != 0 {
				gpu.SyncAndFreeStream(s)
			}
		}
	}()
	for i := range streams {
		if streams[i], err = gpu.NewStream(); err != nil {
			return err
		}
	}
	turns := make([]int, r.Threads)
	err = runParallel(r.Threads, r.Hi-r.Lo, step, func(w int, lo, hi int64) error {
		if err := ctx.Err(); err != nil {
			return errs.Cause(ctx)
		}
		at := w*each + turns[w]%each
		turns[w]++
		if err := gpu.SyncStream(streams[at]); err != nil {
			return err
		}
		slot := r.Slots + uint64(at)*uint64(step)
		if err := readAt(file, unsafe.Slice((*byte)(device.Pointer(uintptr(slot))), hi-lo), r.Lo+lo); err != nil {
			return err
		}
		return gpu.Copy(stream.Order{Stream: streams[at]}, r.To+uint64(lo), slot, hi-lo, false)
	})
	for _, s := range streams {
		if e := gpu.SyncStream(s); err == nil {
			err = e
		}
	}
	return err
}
