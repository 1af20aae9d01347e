package bench

// This file measures the machine without overwire.

import (
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device/cpu"
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

// floorBytes returns how much memory the measurements use. It exceeds every cache, unless the whole run is tiny.
func (r *run) floorBytes() int64 { return max(32<<20, min(512<<20, r.Size>>20<<20)) }

// mapFresh maps memory as the CPU device does, calls fn with it, and unmaps it.
func mapFresh(n int64, fn func([]byte) error) error {
	p, length, err := cpu.Map(n)
	if err != nil {
		return err
	}
	defer cpu.Unmap(p, length)
	return fn(unsafe.Slice((*byte)(p), n))
}

// measureFloors measures the report's floors.
func (r *run) measureFloors() error {
	f := &r.report.Floors
	threads, floorBytes := r.Threads, r.floorBytes()
	err := mapFresh(floorBytes, func(src []byte) error {
		return mapFresh(floorBytes, func(dst []byte) (err error) {
			touchPages(src)
			touchPages(dst)
			if f.CopyOne, err = r.medianRate(floorBytes, func() error { copy(dst, src); return nil }); err != nil {
				return err
			}
			f.CopyAll, err = r.medianRate(floorBytes, func() error {
				return runParallel(threads, floorBytes, 8<<20, func(_ int, lo, hi int64) error {
					copy(dst[lo:hi], src[lo:hi])
					return nil
				})
			})
			return err
		})
	})
	if err != nil {
		return err
	}
	file, err := r.writeCachedFile()
	if err != nil {
		return err
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
		if *c.read, err = r.medianRate(floorBytes, func() error {
			return runParallel(c.threads, floorBytes, piece, func(w int, lo, hi int64) error {
				return readAt(file, bufs[w][:hi-lo], lo)
			})
		}); err != nil {
			return err
		}
		if *c.fault, err = r.freshSpeed(func(m []byte) error {
			return runParallel(c.threads, floorBytes, 8<<20, func(_ int, lo, hi int64) error {
				touchPages(m[lo:hi])
				return nil
			})
		}); err != nil {
			return err
		}
		if c.rawResult == nil {
			continue
		}
		if *c.rawResult, err = r.freshSpeed(func(m []byte) error {
			return runParallel(c.threads, floorBytes, piece, func(_ int, lo, hi int64) error {
				return readAt(file, m[lo:hi], lo)
			})
		}); err != nil {
			return err
		}
	}
	return nil
}

// freshSpeed is like medianRate, with memory that fn is the first to touch. Mapping and unmapping are not timed.
func (r *run) freshSpeed(fn func([]byte) error) (float64, error) {
	s, err := r.medianOf(func() (s float64, err error) {
		err = mapFresh(r.floorBytes(), func(m []byte) error {
			s, err = timeOf(func() error { return fn(m) })
			return err
		})
		return s, err
	})
	if err != nil {
		return 0, err
	}
	return rateOf(r.floorBytes(), s), nil
}

// writeCachedFile writes a file of floorBytes bytes and leaves its pages in the page cache.
func (r *run) writeCachedFile() (*os.File, error) {
	file, err := os.Create(r.pathOf("floor"))
	if err != nil {
		return nil, errs.New(errs.ErrIO, "%v", err)
	}
	buf := make([]byte, 8<<20)
	for i := range buf {
		buf[i] = byte(i * 7)
	}
	for n := int64(0); n < r.floorBytes() && err == nil; n += int64(len(buf)) {
		_, err = file.Write(buf)
	}
	if err != nil {
		file.Close()
		return nil, errs.New(errs.ErrIO, "%v", err)
	}
	return file, nil
}

// measureBaseline measures how fast a file's bytes can be copied from the page cache to GPU memory. It uses the best of
// several numbers of threads and slot sizes.
func (r *run) measureBaseline(path string, n int64) error {
	m, err := r.gpu.Alloc([]int64{n})
	if err != nil {
		return err
	}
	defer m[0].Release()
	for _, threads := range []int{8, 12} {
		for _, x := range []Reading{{Step: ReadStep, Each: SlotsEach}, {Step: 2 * ReadStep, Each: 2}} {
			x.Path, x.Hi, x.GPU, x.Threads = path, n, r.gpu.Index(), min(threads, r.Threads)
			x.To = uint64(uintptr(m[0].Ptr))
			rate, err := r.rateOfReading(x)
			if err != nil {
				return err
			}
			r.baseline = max(r.baseline, rate)
		}
	}
	r.report.Device.Baseline = r.baseline
	r.addRow(Row{Group: "this machine", Name: "read the page cache and copy it to " + r.report.Device.Name,
		Value: r.baseline, Unit: "GB/s"})
	return nil
}

// rateOfReading returns the median rate of a Reading to a GPU, with newly allocated slots.
func (r *run) rateOfReading(x Reading) (float64, error) {
	n := int64(x.Threads*x.Each) * x.Step
	p, length, err := cpu.Map(n)
	if err != nil {
		return 0, err
	}
	slots := unsafe.Slice((*byte)(p), n)
	touchPages(slots)
	if err := r.gpu.Register(slots); err != nil {
		cpu.Unmap(p, length)
		return 0, err
	}
	defer r.gpu.Unregister(slots, func() { cpu.Unmap(p, length) })
	x.Slots = uint64(uintptr(p))
	return r.medianRate(x.Hi-x.Lo, func() error { return x.Run(r.ctx) })
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
