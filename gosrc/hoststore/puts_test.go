package hoststore

import (
	"context"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/file"
)

// A file that the store does not have is put into it while a model reads it. If the model reads directly from the disk,
// the put begins after the load, and AwaitPuts does not wait for it.
func TestPutWhileLoading(t *testing.T) {
	container, _ := files(t)
	s := newStore(t, 1<<30)
	open := func(ctx context.Context, uri string, _ source.Outline) (source.Source, error) {
		f, err := file.Open(uri)
		return settled{f}, err
	}
	begin := func(how string) (*Link, source.Source) {
		link := &Link{path: s.Path(), users: 1}
		src, err := link.Open(open)(t.Context(), container, source.Outline{})
		if err != nil {
			t.Fatal(err)
		}
		src.Facts().File.Expect(src.Size(), true, how)
		if err := src.ReadAt(t.Context(), make([]byte, 1<<20), 0); err != nil {
			t.Fatal(err)
		}
		isDirect := src.Facts().File.DirectBytes() > 0
		if how == "direct" && !isDirect {
			t.Skip("direct I/O is not available")
		}
		link.NoteRead()
		return link, src
	}
	link, src := begin("buffered")
	report(t, s, func(r *Report) bool { return len(r.Entries) == 1 && r.Entries[0].State == "ready" })
	_ = src.Close()
	link.Done()
	if !AwaitPuts(time.Minute) {
		t.Error("a put is still running")
	}
	link, src = begin("buffered")
	if _, isAbsent := src.(*absentFile); isAbsent || link.Held() != 1 {
		t.Errorf("got a %T, expected a file from the store", src)
	}
	_ = src.Close()
	link.Done()
	c := dial(t, s)
	if _, err := c.Drop(t.Context(), s.table.report().Entries[0].Name); err != nil {
		t.Fatal(err)
	}
	link, src = begin("direct")
	defer link.Done()
	if !AwaitPuts(time.Minute) || len(s.table.report().Entries) > 0 {
		t.Error("a put did not wait for the load")
	}
	_ = src.Close()
	report(t, s, func(r *Report) bool { return len(r.Entries) == 1 && r.Entries[0].State == "ready" })
	if !AwaitPuts(time.Minute) {
		t.Error("a put is still running")
	}
}

// If the store ends before or during a put, or no longer has enough memory, the load continues. The store keeps nothing
// of the file, and no put is running. The next load tries again.
func TestPutsFail(t *testing.T) {
	container, _ := files(t)
	for _, c := range []struct {
		what  string
		spoil func(s *Store)
	}{
		{"ended", func(s *Store) { s.Close() }},
		{"no memory", func(s *Store) {
			left := []int64{1 << 40, spare / 4} // when the put is accepted, and when its memory is allocated
			s.table.available = func() int64 {
				n := left[0]
				left = left[min(1, len(left)-1):]
				return n
			}
		}},
	} {
		t.Run(c.what, func(t *testing.T) {
			s := newStore(t, 1<<30)
			source.Notices()
			link := &Link{path: s.Path(), users: 1}
			src, err := link.Open(func(_ context.Context, uri string, _ source.Outline) (source.Source, error) {
				f, err := file.Open(uri)
				return settled{f}, err
			})(t.Context(), container, source.Outline{})
			if err != nil {
				t.Fatal(err)
			}
			if _, isAbsent := src.(*absentFile); !isAbsent {
				t.Fatalf("%T", src)
			}
			c.spoil(s)
			link.NoteRead()
			equalBytes(t, src, container)
			_ = src.Close()
			link.Done()
			if !AwaitPuts(time.Minute) || len(source.Notices()) != 1 || s.table.report().Used != 0 {
				t.Errorf("%+v", s.table.report())
			}
		})
	}
}
