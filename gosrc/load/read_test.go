package load

import (
	"bytes"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/file"
)

var ways = []string{"auto", "buffered", "direct"}

// Every read mode gives the right bytes, for whole tensors and slices. Small tensors share pieces, large tensors are
// read directly to their destination, and none is aligned.
func TestReadWays(t *testing.T) {
	p1, b1 := write(t, "a", []int64{3, 5}, []int64{1_300_001}, []int64{7}, []int64{130, 10_001}, []int64{200_000})
	p2, b2 := write(t, "b", []int64{2, 2, 2}, []int64{2_500_000})
	want := append(append([][]byte{}, b1...), b2...)
	off := false
	for _, how := range ways {
		m := opened(t, Spec{URIs: []string{p1, p2}, Map: &off})
		l, rep := ended(t, m, Options{Read: how})
		for i := range want {
			mem, _, _, ok := l.Take(i)
			if !ok || !bytes.Equal(mem.Slice(), want[i]) {
				t.Errorf("%s: tensor %d: %v, or wrong bytes", how, i, ok)
			}
			mem.Release()
		}
		t.Logf("%s: %d of %d bytes by direct I/O", how, rep.DirectIO, rep.Bytes)
		if how != "direct" && rep.DirectIO != 0 || rep.DirectIO > rep.Stages.ReadBytes {
			t.Errorf("%s: %d bytes by direct I/O", how, rep.DirectIO)
		}
		l.Close()
		s, err := m.Start([]Request{{Tensor: 3, Lo0: 17, Hi0: 113, Hi1: -1},
			{Tensor: 3, Hi0: -1, Lo1: 5000, Hi1: 9999}}, Options{Read: how})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Job().Wait(-1); err != nil {
			t.Fatalf("%s: %v", how, err)
		}
		rows, _, _, _ := s.Take(0)
		cols, _, _, _ := s.Take(1)
		if !bytes.Equal(rows.Slice(), b1[3][17*10_001:113*10_001]) {
			t.Errorf("%s: wrong rows", how)
		}
		for r := range 130 {
			if !bytes.Equal(cols.Slice()[r*4999:(r+1)*4999], b1[3][r*10_001+5000:r*10_001+9999]) {
				t.Errorf("%s: wrong columns in row %d", how, r)
				break
			}
		}
		rows.Release()
		cols.Release()
		s.Close()
	}
	settled(t)
}

// If a file was truncated after it was opened, the load fails with a typed error in every read mode, and if the file
// is mapped. The error has the offset of a missing byte and, if the file is read, the tensor.
func TestTruncatedInEveryReadMode(t *testing.T) {
	for _, how := range append(ways, "mapped") {
		path, _ := write(t, "a", []int64{1 << 20}, []int64{3 << 20}, []int64{100})
		mapped := how == "mapped"
		m := opened(t, Spec{URIs: []string{path}, Map: &mapped})
		cut := m.Index().Tensors[1].Off + 1_234_567
		if err := os.Truncate(path, cut); err != nil {
			t.Fatal(err)
		}
		way := how
		if mapped {
			way = ""
		}
		l, err := m.Start(nil, Options{Read: way})
		if err == nil {
			_, err = l.Job().Wait(-1)
			l.Close()
		}
		var at *errs.At
		if !errors.Is(err, errs.ErrCorrupt) || !errors.As(err, &at) || at.Source != path {
			t.Errorf("%s: %v, want ErrCorrupt", how, err)
			continue
		}
		// Any read past the cut may fail first.
		if mapped && at.Offset != cut {
			t.Errorf("mapped: %v, cut at %d", err, cut)
		}
		if !mapped && (at.Offset < cut || at.Tensor == "" || at.Tensor == "a.t0") {
			t.Errorf("%s: %v, cut at %d", how, err, cut)
		}
	}
	settled(t)
}

// If a file is truncated while it is read, the load gives the original bytes or an error. If the file is replaced, the
// load gives the original bytes.
func TestChangedDuringALoad(t *testing.T) {
	off := false
	failed := 0
	for i := range 12 {
		path, want := write(t, "a", []int64{2 << 20}, []int64{2 << 20})
		m := opened(t, Spec{URIs: []string{path}, Map: &off})
		l, err := m.Start(nil, Options{Read: ways[i%len(ways)], Threads: 2})
		if err != nil {
			t.Fatal(err)
		}
		replaced := i%2 == 0
		if replaced {
			if err := os.WriteFile(path+".new", make([]byte, 1000), 0o600); err != nil {
				t.Fatal(err)
			}
			err = os.Rename(path+".new", path)
		} else {
			time.Sleep(time.Duration(i) * 50 * time.Microsecond)
			err = os.Truncate(path, 3<<20)
		}
		if err != nil {
			t.Fatal(err)
		}
		_, err = l.Job().Wait(-1)
		switch {
		case err == nil:
			for k := range want {
				mem, _, _, ok := l.Take(k)
				if !ok || !bytes.Equal(mem.Slice(), want[k]) {
					t.Errorf("run %d: tensor %d has bytes that were never in the file", i, k)
				}
				mem.Release()
			}
		case replaced || !errors.Is(err, errs.ErrCorrupt):
			t.Errorf("run %d: %v", i, err)
		default:
			failed++
		}
		l.Close()
		m.Close()
	}
	t.Logf("%d of 6 truncations came in time", failed)
	settled(t)
}

// remote is a file that claims to be on a network.
type remote struct{ *file.File }

func (r remote) Facts() source.Facts {
	f := r.File.Facts()
	f.Remote = true
	return f
}

// Local plain files are mapped unless mapping is turned off. Files on a network are mapped only if mapping is turned
// on. The argument takes precedence over the setting.
func TestWhatIsMapped(t *testing.T) {
	path, want := write(t, "a", []int64{3000, 100})
	yes, no := true, false
	defer knob.Load(nil)
	for _, c := range []struct {
		word          *bool
		knob          string
		local, remote bool
	}{
		{nil, "", true, false}, {nil, "auto", true, false}, {nil, "on", true, true}, {nil, "off", false, false},
		{&yes, "off", true, true}, {&no, "on", false, false}, {&yes, "", true, true}, {&no, "", false, false},
	} {
		knob.Load(map[string]string{"OVERWIRE_MMAP": c.knob})
		for _, far := range []bool{false, true} {
			m := opened(t, Spec{URIs: []string{path}, Map: c.word})
			if far {
				m.srcs[0] = remote{m.srcs[0].(*file.File)}
			}
			l, rep := ended(t, m, Options{})
			mem, _, _, _ := l.Take(0)
			if !bytes.Equal(mem.Slice(), want[0]) {
				t.Error("wrong bytes")
			}
			mem.Release()
			l.Close()
			if mapped := c.local && !far || c.remote && far; (rep.Mapped > 0) != mapped {
				t.Errorf("argument %v, setting %q, on a network: %v: %d bytes mapped", c.word != nil, c.knob, far, rep.Mapped)
			}
		}
	}
	settled(t)
}

// asked is a source that counts how often a plan is announced to it.
type asked struct {
	source.Source
	source.File
	times int
}

func (a *asked) Facts() source.Facts { return source.Facts{File: a} }

func (a *asked) Expect(int64, bool, string) int { a.times++; return 3 }

// A plan is announced to each file once, even if the plan returns to the file repeatedly. It is not announced to a file
// that it does not read.
func TestExpectOnce(t *testing.T) {
	srcs := []source.Source{&asked{}, &asked{}, &asked{}}
	p := &plan.Plan{Pieces: []plan.Piece{{Source: 0}, {Source: 2}, {Source: 0}, {Source: 2}, {Source: 2}}}
	files, depth := AnnouncePlan(srcs, p, false, "auto")
	if len(files) != 2 || files[0] != source.File(srcs[0].(*asked)) || files[1] != source.File(srcs[2].(*asked)) ||
		depth != 3 {
		t.Errorf("%d files, %d reads in flight", len(files), depth)
	}
	for i, want := range []int{1, 0, 1} {
		if got := srcs[i].(*asked).times; got != want {
			t.Errorf("file %d is announced %d times, not %d", i, got, want)
		}
	}
}

// A file that is written in place after it was opened is refused by loads and by Pin. A file that is removed, linked or
// given a different mode can still be read.
func TestWrittenInPlace(t *testing.T) {
	for _, mapped := range []bool{true, false} {
		path, want := write(t, "a", []int64{300_000}, []int64{10})
		m, pinned := opened(t, Spec{URIs: []string{path}, Map: &mapped}), opened(t, Spec{URIs: []string{path}})
		loaded := func() error {
			l, err := m.Start(nil, Options{})
			if err != nil {
				return err
			}
			defer l.Close()
			_, err = l.Job().Wait(-1)
			return err
		}
		if err := errors.Join(os.Chmod(path, 0o640), os.Link(path, path+"2"), loaded(), os.Remove(path),
			loaded()); err != nil {
			t.Errorf("mapped %v: a file that was not written to: %v", mapped, err)
		}
		f, err := os.OpenFile(path+"2", os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		st, _ := f.Stat()
		_, err = f.WriteAt(want[1], st.Size()-10)
		// The file system's clock may be too coarse to show the change.
		if err := errors.Join(err, f.Close(), os.Chtimes(path+"2", time.Now(),
			time.Now().Add(time.Second))); err != nil {
			t.Fatal(err)
		}
		j, err := pinned.Pin(Options{})
		if err == nil {
			_, err = j.Wait(-1)
		}
		for what, err := range map[string]error{"load": loaded(), "pin": err} {
			var where *errs.At
			if !errors.Is(err, errs.ErrCorrupt) || !errors.As(err, &where) || where.Source != path {
				t.Errorf("mapped %v: %s: %v", mapped, what, err)
			}
		}
	}
}
