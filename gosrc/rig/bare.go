package main

// This file measures each open codec beside the library that it uses.

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"

	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/snappy"
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/measure"
	"github.com/overwire/overwire/gosrc/nvcomp/deflate"
	ourlz4 "github.com/overwire/overwire/gosrc/nvcomp/lz4"
	oursnappy "github.com/overwire/overwire/gosrc/nvcomp/snappy"
	ourzstd "github.com/overwire/overwire/gosrc/nvcomp/zstd"
)

const (
	bareBytes = 1 << 20
	bareChunk = 64 << 10
	// bareShare is the share of its library's speed that a codec must reach.
	bareShare = 0.95
)

// A coder encodes a chunk into dst, of length 0 and enough capacity, and decodes
// one into dst, of the content's length.
type coder struct {
	encode func(dst, src []byte) ([]byte, error)
	decode func(dst, src []byte) error
}

// words are compressible bytes: words in random order.
func words(n int) []byte {
	r := rand.New(rand.NewPCG(1, 2))
	var list [300][]byte
	for i := range list {
		word := make([]byte, 3+r.IntN(37))
		for k := range word {
			word[k] = byte(r.Uint32())
		}
		list[i] = word
	}
	out := make([]byte, 0, n+40)
	for len(out) < n {
		out = append(out, list[r.IntN(len(list))]...)
	}
	return out[:n]
}

// bare measures each open codec's own call beside that of its library: the same
// chunks, alternating, on one core.
func (r *run) bare() error {
	src := words(bareBytes)
	for _, name := range []string{"LZ4", "Snappy", "Zstd", "Deflate", "Gzip"} {
		ours, library, err := coders(name)
		if err != nil {
			return err
		}
		if err := r.bareRows(name, src, ours, library); err != nil {
			return err
		}
	}
	return nil
}

// bareRows adds the rows of one codec. Each side decodes what the other has
// encoded.
func (r *run) bareRows(name string, src []byte, ours, library coder) error {
	var chunks [2][][]byte
	room, back := make([]byte, 0, 2*bareChunk), make([]byte, bareChunk)
	encode := func(c coder, keep *[][]byte) error {
		for at := 0; at < len(src); at += bareChunk {
			made, err := c.encode(room, src[at:at+bareChunk])
			if err != nil {
				return err
			}
			if keep != nil {
				*keep = append(*keep, bytes.Clone(made))
			}
		}
		return nil
	}
	decode := func(c coder, chunks [][]byte, compare bool) error {
		for i, p := range chunks {
			if err := c.decode(back, p); err != nil {
				return err
			}
			if compare && !bytes.Equal(back, src[i*bareChunk:][:bareChunk]) {
				return errs.New(errs.ErrEngine, "%s gives other bytes", name)
			}
		}
		return nil
	}
	both := [2]coder{ours, library}
	for i, c := range both {
		if err := encode(c, &chunks[i]); err != nil {
			return err
		}
		for _, d := range both {
			if err := decode(d, chunks[i], true); err != nil {
				return err
			}
		}
	}
	for _, what := range []string{"encode", "decode"} {
		seconds, err := r.alternate(func(i int) error {
			if what == "encode" {
				return encode(both[i], nil)
			}
			return decode(both[i], chunks[0], false)
		})
		if err != nil {
			return err
		}
		mine, bare := float64(len(src))/seconds[0]/1e9, float64(len(src))/seconds[1]/1e9
		r.Add(measure.Row{Group: "codec", Name: fmt.Sprintf("%s, words, 64 KiB: %s, one core", name, what), Value: mine, Unit: "GB/s",
			Floor: bare, FloorName: "its library alone", Goal: fmt.Sprintf("share >= %v", bareShare), Reached: atLeast(mine/bare, bareShare)})
	}
	return nil
}

// alternate runs both sides one after the other, several times after one warm-up,
// and returns the fastest of each: the work is the same every time.
func (r *run) alternate(side func(i int) error) (best [2]float64, err error) {
	for round := range 5*r.Repeat + 1 {
		for k := range 2 {
			i := (k + round) % 2
			if err := r.Stopped(); err != nil {
				return best, err
			}
			s, err := measure.Timed(func() error { return side(i) })
			if err != nil {
				return best, err
			}
			if round > 0 && (best[i] == 0 || s < best[i]) {
				best[i] = s
			}
		}
	}
	return best, nil
}

// coders are our calls of a codec, and its library's with the same settings.
func coders(name string) (ours, library coder, err error) {
	switch name {
	case "LZ4":
		var c lz4.Compressor
		return coder{ourlz4.Encode, ourlz4.Decode}, coder{
			func(dst, src []byte) ([]byte, error) {
				n, err := c.CompressBlock(src, dst[:lz4.CompressBlockBound(len(src))])
				return dst[:n], err
			},
			func(dst, src []byte) error { _, err := lz4.UncompressBlock(src, dst); return err },
		}, nil
	case "Snappy":
		return coder{oursnappy.Encode, oursnappy.Decode}, coder{
			func(dst, src []byte) ([]byte, error) {
				return snappy.Encode(dst[:snappy.MaxEncodedLen(len(src))], src), nil
			},
			func(dst, src []byte) error { _, err := snappy.Decode(dst, src); return err },
		}, nil
	case "Zstd":
		e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false), zstd.WithAllLitEntropyCompression(true))
		if err != nil {
			return ours, library, errs.New(errs.ErrEngine, "Zstandard: %v", err)
		}
		d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1))
		if err != nil {
			return ours, library, errs.New(errs.ErrEngine, "Zstandard: %v", err)
		}
		return coder{ourzstd.Encode, ourzstd.Decode}, coder{
			func(dst, src []byte) ([]byte, error) { return e.EncodeAll(src, dst), nil },
			func(dst, src []byte) error { _, err := d.DecodeAll(src, dst[:0]); return err },
		}, nil
	case "Deflate":
		return deflating(false)
	}
	return deflating(true)
}

// deflating is Deflate or Gzip at the library's level 1, which is ours, too.
func deflating(gz bool) (ours, library coder, err error) {
	ours = coder{
		func(dst, src []byte) ([]byte, error) { return deflate.Encode(dst, src, 1, gz) },
		func(dst, src []byte) error { return deflate.Decode(dst, src, gz) },
	}
	var from bytes.Reader
	var to bytes.Buffer
	var w interface {
		io.WriteCloser
		Reset(io.Writer)
	}
	var open func() (io.Reader, error)
	if gz {
		w, err = gzip.NewWriterLevel(&to, 1)
		var g gzip.Reader
		open = func() (io.Reader, error) { return &g, g.Reset(&from) }
	} else {
		w, err = flate.NewWriter(&to, 1)
		f := flate.NewReader(&from)
		open = func() (io.Reader, error) { return f, f.(flate.Resetter).Reset(&from, nil) }
	}
	library = coder{
		func(_, src []byte) ([]byte, error) {
			to.Reset()
			w.Reset(&to)
			if _, err := w.Write(src); err != nil {
				return nil, err
			}
			err := w.Close()
			return to.Bytes(), err
		},
		func(dst, src []byte) error {
			from.Reset(src)
			r, err := open()
			if err != nil {
				return err
			}
			_, err = io.ReadFull(r, dst)
			return err
		},
	}
	return ours, library, err
}
