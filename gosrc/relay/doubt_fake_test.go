//go:build owfake

package relay_test

import (
	"context"
	"errors"
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/load/loadtest"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/source"
)

// A damaged source has one wrong byte, until a reader doubts the range that contains it.
type damaged struct {
	source.Source
	at     int64
	doubts chan int64
}

func (d *damaged) Facts() source.Facts {
	f := d.Source.Facts().ReadAtOnly()
	f.Doubt = func(off, n int64) bool {
		if off <= d.at && d.at < off+n {
			d.at = -1
		}
		d.doubts <- off
		return true
	}
	return f
}

func (d *damaged) ReadAt(ctx context.Context, p []byte, off int64) error {
	err := d.Source.ReadAt(ctx, p, off)
	if at := d.at; at >= off && at < off+int64(len(p)) {
		p[at-off] ^= 1
	}
	return err
}

// Loads report wrong bytes to their source. A load to a GPU, alone or in a group, raises CorruptError, and the next
// load gets the right bytes. A group load to the host reads the bytes again.
func TestDoubt(t *testing.T) {
	_, m, _ := loadtest.WriteModel(t, save.Spec{Compress: true, ChunkBytes: 64 << 10}, "tied", 4<<20)
	ix := m.Index()
	travel := filled(m)
	reqs := asked(m, travel, 0)
	sizes := make([]int64, len(reqs))
	for i, b := range sliced(t, m, reqs) {
		sizes[i] = int64(len(b))
	}
	for _, c := range []struct {
		where   string
		isGroup bool
		rereads bool
	}{{"cuda:0", false, false}, {"cuda:0", true, false}, {"cpu", true, true}} {
		end := cuda.Fake(512 << 20)
		src := &damaged{m.Sources()[0], ix.Chunks[len(ix.Chunks)/2].Off, make(chan int64, 100)}
		now := load.Of(ix, []source.Source{src}, nil)
		attempt := func() error {
			if !c.isGroup {
				l, err := now.Start(reqs, load.Options{Device: c.where})
				if err != nil {
					return err
				}
				defer l.Close()
				return loadtest.Finish(t, l)
			}
			got, ring := memoryOn(t, c.where, sizes), memoryOn(t, c.where, []int64{alone, alone})
			defer got.free()
			defer ring.free()
			r, err := begun(now, specOf(travel, ring, c.where, 0, 1, alone), requests(reqs, got))
			if err == nil {
				err = passed(r)
			}
			return err
		}
		if err := attempt(); errors.Is(err, errs.ErrCorrupt) == c.rereads {
			t.Errorf("%+v: %v", c, err)
		}
		if len(src.doubts) == 0 {
			t.Errorf("%+v: the source does not know of the wrong bytes", c)
		}
		if err := attempt(); err != nil {
			t.Errorf("%+v: the second load: %v", c, err)
		}
		if left := end(); left != "" {
			t.Errorf("%+v: leaked: %s", c, left)
		}
	}
}
