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
