package main

// This file measures loads of files that are not in the page cache.

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/measure"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/source/file"
)

// measureCold measures loads of files that are not in the page cache, alternating with
// direct reads of the same disk, because disks drift. Before each, the file is
// dropped from the cache, and the kernel is asked how much of it is left.
func (r *run) measureCold() error {
	const group = "cold"
	plain, packed := r.Path("cold-plain.safetensors"), r.Path("cold.safetensors")
	total, err := r.coldFiles(plain, packed)
	if err != nil {
		return err
	}
	disk := coldFile{path: plain}
	if _, err := disk.readFloor(); err != nil {
		r.Missing(group, "loads of cold files", err.Error())
		return nil
	}
	if left, err := disk.evictPages(); err != nil || left > 0.01 {
		r.Missing(group, "loads of cold files", fmt.Sprintf(
			"the file cannot be dropped from the page cache (%.2f of it stay)", left))
		return nil
	}
	ways := []struct {
		name, path, how string
		warm            bool
	}{
		{"plain, by direct I/O", plain, "direct", false},
		{"plain, through the cache", plain, "buffered", false},
		{"plain, again from the cache", plain, "buffered", true},
		{"compressed, by default", packed, "auto", false},
		{"compressed, by direct I/O", packed, "direct", false},
		{"compressed, through the cache", packed, "buffered", false},
	}
	floors, seconds, left := []float64{}, make([][]float64, len(ways)), make([]float64, len(ways))
	for range r.Repeat {
		for i, w := range ways {
			if err := r.Stopped(); err != nil {
				return err
			}
			f := coldFile{path: w.path}
			if !w.warm {
				disk.evictPages()
				s, err := disk.readFloor()
				if err != nil {
					return err
				}
				floors = append(floors, s)
				share, err := f.evictPages()
				if err != nil {
					return err
				}
				left[i] = max(left[i], share)
			}
			s, err := measure.Timed(func() error { return r.Loaded(w.path, load.Options{Read: w.how}, nil) })
			if err != nil {
				return err
			}
			seconds[i] = append(seconds[i], s)
		}
	}
	st, err := os.Stat(plain)
	if err != nil {
		return errs.New(errs.ErrIO, "%v", err)
	}
	floor := measure.Rate(st.Size(), measure.Middle(floors))
	for i, w := range ways {
		row := measure.Row{Group: group, Name: fmt.Sprintf("load %.1f GB %s", float64(total)/1e9, w.name),
			Value: measure.Rate(total, measure.Middle(seconds[i])), Unit: "GB/s",
			Floor: floor, FloorName: "O_DIRECT, 16 x 1 MiB",
			Note: fmt.Sprintf("at most %.4f of the file resident before", left[i])}
		switch {
		case w.warm:
			row.Note = ""
		case w.how == "direct" && w.path == plain:
			row.Goal, row.Reached = ">= 0.97 x floor", atLeast(row.Value/floor, 0.97)
		case w.how == "direct":
			row.Goal, row.Reached = ">= 1.45 x floor", atLeast(row.Value/floor, 1.45)
		}
		r.Add(row)
	}
	return r.coldPython(plain, packed, total, floor)
}

// coldPython measures what a user's process sees, which has imported torch: cold
// files, every byte read, in each way of reading and by safetensors.
func (r *run) coldPython(plain, packed string, total int64, floor float64) error {
	const group = "cold"
	name := func(what string) string {
		return fmt.Sprintf("load_file of %.1f GB, every byte read, %s", float64(total)/1e9, what)
	}
	s, notes, missing, err := r.runTurns([]string{"cold", packed, "auto"}, []string{"cold", packed, "buffered"},
		[]string{"cold", packed, "direct"},
		[]string{"cold", plain, "auto"}, []string{"coldpeer", plain})
	if missing != "" {
		r.Missing(group, name("fresh process"), missing)
	}
	if missing != "" || err != nil {
		return err
	}
	for i, what := range []string{"compressed, by default", "compressed, buffered", "compressed, direct",
		"plain, by default", "plain"} {
		r.Add(measure.Row{Group: group, Name: name(what), Value: measure.Rate(total, s[i]), Unit: "GB/s", Floor: floor,
			FloorName: "O_DIRECT, 16 x 1 MiB",
			Note:      notes[i] + ", fresh process"})
	}
	return nil
}

// coldFiles writes the model, plain and packed, compares every byte in each way
// of reading, and returns how many bytes of tensors it has.
func (r *run) coldFiles(plain, packed string) (int64, error) {
	in, total, err := r.Make("llama-bf16", min(r.Size, 2e9), 4)
	if err != nil {
		return 0, err
	}
	for path, compress := range map[string]bool{plain: false, packed: true} {
		if _, err := save.Write(r.Ctx, r.Job, save.Spec{Path: path, Compress: compress, Threads: r.Threads},
			in); err != nil {
			return 0, err
		}
		for _, how := range []string{"direct", "buffered"} {
			if err := r.SameRead(path, in, how); err != nil {
				return 0, err
			}
		}
	}
	return total, nil
}

// coldFile is a file that is read off the disk.
type coldFile struct{ path string }

// evictPages drops the file from the page cache and returns the share that stays.
func (c coldFile) evictPages() (left float64, err error) {
	f, err := os.Open(c.path)
	if err != nil {
		return 1, errs.New(errs.ErrIO, "%v", err)
	}
	defer f.Close()
	_ = unix.Fdatasync(int(f.Fd()))
	_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	left, ok := file.Resident(f)
	if !ok {
		return 1, errs.New(errs.ErrNotSupported, "the kernel does not tell what is resident")
	}
	return left, nil
}

// readFloor reads the file's whole MiB with O_DIRECT into memory that is touched
// already, and returns the seconds for the whole file.
func (c coldFile) readFloor() (float64, error) {
	const readers, piece = 16, 1 << 20
	f, err := os.OpenFile(c.path, os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return 0, errs.New(errs.ErrNotSupported, "no O_DIRECT on this file system: %v", err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return 0, errs.New(errs.ErrIO, "%v", err)
	}
	n := st.Size() / piece * piece
	if n == 0 {
		return 0, errs.New(errs.ErrNotSupported, "%d bytes are too few to measure", st.Size())
	}
	var s float64
	err = measure.Fresh(readers*piece, func(m []byte) (err error) {
		measure.Touch(m)
		s, err = measure.Timed(func() error {
			return measure.Parallel(readers, n, piece, func(w int, lo, hi int64) error {
				return measure.ReadAt(f, m[w*piece:][:hi-lo], lo)
			})
		})
		return err
	})
	return s * float64(st.Size()) / float64(n), err
}
