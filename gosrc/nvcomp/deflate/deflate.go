// Package deflate implements Deflate (RFC 1951) and Gzip (RFC 1952). Other writers are zlib, libdeflate and nvCOMP.
// Neither format starts with the length of its content, so Size must decode the stream.
package deflate

import (
	"bytes"
	"io"
	"sync"

	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/gzip"

	"github.com/overwire/overwire/gosrc/errs"
)

// MaxRatio is the maximum number of bytes that one byte decodes to: a match of 258 bytes takes at least two bits.
const MaxRatio = 1032

// levels are indexed by nvCOMP's algorithm_type: 0 is only entropy coding, 1 the fastest match finder, 5 the best
// compression.
var levels = [...]int{flate.HuffmanOnly, 1, 3, 3, 6, 9}

// Bound returns the maximum number of bytes that Encode appends for n bytes: stored blocks, and Gzip's header and
// trailer.
func Bound(n int) int { return n + 5*(n/16383+2) + 32 }

type writer interface {
	io.WriteCloser
	Reset(io.Writer)
}

var writers [2][len(levels)]sync.Pool

// Encode appends src to dst as Gzip, or as plain Deflate if gz is false. It is safe for concurrent use.
func Encode(dst, src []byte, level int, gz bool) ([]byte, error) {
	if level < 0 || level >= len(levels) {
		return dst, errs.New(errs.ErrArgument, "invalid level (algorithm_type) %d: expected 0 to %d",
			level, len(levels)-1)
	}
	kind := 0
	if gz {
		kind = 1
	}
	pool := &writers[kind][level]
	w, _ := pool.Get().(writer)
	if w == nil {
		var err error
		if gz {
			w, err = gzip.NewWriterLevel(io.Discard, levels[level])
		} else {
			w, err = flate.NewWriter(io.Discard, levels[level])
		}
		if err != nil {
			return dst, errs.New(errs.ErrEngine, "Deflate: %v", err)
		}
	}
	out := bytes.NewBuffer(dst)
	w.Reset(out)
	_, err := w.Write(src)
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		return dst, errs.New(errs.ErrEngine, "Deflate: %v", err)
	}
	w.Reset(io.Discard)
	pool.Put(w)
	return out.Bytes(), nil
}

// A reader decodes one stream at a time.
type reader struct {
	src   bytes.Reader
	gzip  gzip.Reader
	flate io.ReadCloser
}

var readers = sync.Pool{New: func() any { return new(reader) }}

// open starts reading src.
func (r *reader) open(src []byte, gz bool) (io.Reader, error) {
	r.src.Reset(src)
	if gz {
		if err := r.openMember(); err != nil {
			return nil, errs.New(errs.ErrCorrupt, "Gzip: %v", err)
		}
		return (*members)(r), nil
	}
	if r.flate == nil {
		r.flate = flate.NewReader(&r.src)
	} else if err := r.flate.(flate.Resetter).Reset(&r.src, nil); err != nil {
		return nil, errs.New(errs.ErrEngine, "Deflate: %v", err)
	}
	return r.flate, nil
}

func (r *reader) openMember() error {
	err := r.gzip.Reset(&r.src)
	r.gzip.Multistream(false)
	return err
}

// members reads the members of a Gzip stream in order. Like gzip and Python, it skips zeros after a member.
type members reader

// Read reads from the current member, or from the next one.
func (m *members) Read(p []byte) (int, error) {
	r := (*reader)(m)
	for {
		n, err := r.gzip.Read(p)
		if err != io.EOF {
			return n, err
		}
		if n > 0 {
			return n, nil
		}
		for r.src.Len() > 0 {
			if b, _ := r.src.ReadByte(); b != 0 {
				_ = r.src.UnreadByte()
				break
			}
		}
		if r.src.Len() == 0 {
			return 0, io.EOF
		}
		if err := r.openMember(); err != nil {
			return 0, err
		}
	}
}

// end checks that the stream ends at the end of src.
func (r *reader) end() error {
	if r.src.Len() > 0 {
		return errs.New(errs.ErrCorrupt, "%d bytes follow the end of the Deflate stream", r.src.Len())
	}
	return nil
}

func (r *reader) free() {
	r.src.Reset(nil)
	readers.Put(r)
}

// Size returns the number of bytes that src decodes to. It decodes src and discards the output. Errors are
// errs.ErrCorrupt.
func Size(src []byte, gz bool) (int64, error) {
	r := readers.Get().(*reader)
	defer r.free()
	from, err := r.open(src, gz)
	if err != nil {
		return 0, err
	}
	n, err := io.Copy(io.Discard, from)
	if err != nil {
		return 0, errs.New(errs.ErrCorrupt, "Deflate: %v", err)
	}
	return n, r.end()
}

// Decode fills dst, which must have the length of the content. A different length or an invalid stream gives
// errs.ErrCorrupt. It is safe for concurrent use.
func Decode(dst, src []byte, gz bool) error {
	r := readers.Get().(*reader)
	defer r.free()
	from, err := r.open(src, gz)
	if err != nil {
		return err
	}
	if n, err := io.ReadFull(from, dst); err != nil {
		return errs.New(errs.ErrCorrupt, "Deflate: decoded only %d of %d bytes: %v", n, len(dst), err)
	}
	var more [1]byte
	if n, err := from.Read(more[:]); n != 0 || err != io.EOF {
		return errs.New(errs.ErrCorrupt, "Deflate: the content has more than %d bytes (%v)", len(dst), err)
	}
	return r.end()
}
