package hoststore

import (
	"context"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/file"
)

// A file that the store does not have is put into it while a model reads it. If the model reads directly from the disk,
// the put waits for the end, and AwaitPuts does not wait for it.
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
			t.Skip("no direct I/O here")
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
		t.Errorf("%T, which the store has", src)
	}
	_ = src.Close()
	link.Done()
	c := dial(t, s)
	if _, err := c.Drop(t.Context(), s.table.report().Entries[0].Name); err != nil {
		t.Fatal(err)
	}
	link, src = begin("direct")
	defer link.Done()
	for range 100 {
		if puts.paused.Load() {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	if !AwaitPuts(time.Minute) || len(s.table.report().Entries) > 0 {
		t.Error("a put did not wait for the load")
	}
	_ = src.Close()
	report(t, s, func(r *Report) bool { return len(r.Entries) == 1 && r.Entries[0].State == "ready" })
	if !AwaitPuts(time.Minute) {
		t.Error("a put is still running")
	}
}
