package s3

// This file sends request bodies without copying the bytes.

import (
	"context"
	"errors"
	"io"
	"sort"
)

// A body reads several byte slices in order, and resets the watchdog of its request.
type body struct {
	all  [][]byte
	ends []int64 // end offset of each slice
	at   int64
	w    *watch
}

func bodyOf(ctx context.Context, all [][]byte) io.ReadSeeker {
	b := &body{all: all, w: ctx.Value(watch{}).(*watch)}
	end := int64(0)
	for _, one := range all {
		end += int64(len(one))
		b.ends = append(b.ends, end)
	}
	return b
}

func sizeOf(all [][]byte) (n int64) {
	for _, one := range all {
		n += int64(len(one))
	}
	return n
}

// restHere returns at most n of the remaining bytes in the current slice, or nil at the end of the body.
func (b *body) restHere(n int) []byte {
	k := sort.Search(len(b.ends), func(k int) bool { return b.ends[k] > b.at })
	if k == len(b.ends) {
		return nil
	}
	one := b.all[k]
	one = one[int64(len(one))-(b.ends[k]-b.at):]
	return one[:min(n, len(one))]
}

func (b *body) Read(p []byte) (n int, err error) {
	b.w.timer.Reset(b.w.limit)
	for n < len(p) {
		one := b.restHere(len(p) - n)
		if one == nil {
			break
		}
		n += copy(p[n:], one)
		b.at += int64(len(one))
	}
	if n == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	return n, nil
}

// WriteTo writes in blocks and resets the watchdog for each.
func (b *body) WriteTo(w io.Writer) (n int64, err error) {
	for one := b.restHere(block); one != nil && err == nil; one = b.restHere(block) {
		b.w.timer.Reset(b.w.limit)
		var k int
		k, err = w.Write(one)
		b.at += int64(k)
		n += int64(k)
	}
	return n, err
}

const block = 256 << 10

func (b *body) Seek(off int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		off += b.at
	case io.SeekEnd:
		off += sizeOf(b.all)
	}
	if off < 0 {
		return 0, errors.New("seek to before the start of the body")
	}
	b.at = off
	return off, nil
}
