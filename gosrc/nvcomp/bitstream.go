// Package nvcomp implements nvCOMP's bitstreams. It encodes and decodes batches of buffers on all cores, with the
// open algorithms in its subpackages and with X16. Packages that load and save files do not use it. There are three
// kinds of bitstream.
//
// A Raw stream is a single block of the algorithm. A WithSize stream is the length of the content, little-endian
// (u64, or u32 for LZ4, as in numcodecs), and a raw block. A Native stream is a container of independent chunks,
// described in native.go.
//
// The input is untrusted. Before memory is allocated, the length of the content is compared with the maximum that the
// stored bytes can decode to. Every decoder fills exactly its part of the memory or fails. Buffers are not used after
// Run has returned.
package nvcomp

import (
	"encoding/binary"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/nvcomp/cascaded"
	"github.com/overwire/overwire/gosrc/nvcomp/deflate"
	"github.com/overwire/overwire/gosrc/nvcomp/gdeflate"
	"github.com/overwire/overwire/gosrc/nvcomp/lz4"
	"github.com/overwire/overwire/gosrc/nvcomp/snappy"
	"github.com/overwire/overwire/gosrc/nvcomp/zstd"
)

// Kind is the kind of a bitstream. The numbers match nvCOMP's BitstreamKind.
type Kind int

// See the package comment for the three kinds.
const (
	Native Kind = iota
	Raw
	WithSize
)

// Algorithm is the number of an algorithm in a Native header: its value in nvCOMP's documented enum nvcompFormatType_t.
type Algorithm uint8

// nvCOMP refuses X16, which only overwire implements.
const (
	LZ4      Algorithm = 0
	Snappy   Algorithm = 1
	ANS      Algorithm = 2
	GDeflate Algorithm = 3
	Cascaded Algorithm = 4
	Bitcomp  Algorithm = 5
	Zstd     Algorithm = 6
	Deflate  Algorithm = 7
	Gzip     Algorithm = 8
	X16      Algorithm = 'X'
)

// An algorithm has functions for the operations that it supports. If decode is nil, only its name is known.
type algorithm struct {
	name     string
	id       Algorithm
	maxChunk int64
	// bound returns the maximum number of bytes that encode appends for n bytes.
	bound  func(n int64) int64
	encode func(dst, src []byte, s *Spec) ([]byte, error)
	decode func(dst, src []byte) error
	// size returns the exact length of a block's content.
	size func(src []byte) (int64, error)
	// most returns an upper bound for the result of size. It is cheap to compute.
	most func(src []byte) (int64, error)
}

// maxBlock is the maximum content size of a chunk in a Native stream.
const maxBlock = 16 << 20

func asInt64(f func(int) int) func(int64) int64 {
	return func(n int64) int64 { return int64(f(int(n))) }
}

func atMostTimes(ratio int64) func([]byte) (int64, error) {
	return func(src []byte) (int64, error) { return int64(len(src)) * ratio, nil }
}

func deflateAlgorithm(name string, id Algorithm, gz bool) algorithm {
	return algorithm{
		name: name, id: id, maxChunk: maxBlock,
		bound:  asInt64(deflate.Bound),
		encode: func(dst, src []byte, s *Spec) ([]byte, error) { return deflate.Encode(dst, src, s.Level, gz) },
		decode: func(dst, src []byte) error { return deflate.Decode(dst, src, gz) },
		size:   func(src []byte) (int64, error) { return deflate.Size(src, gz) },
		most:   atMostTimes(deflate.MaxRatio),
	}
}

var algorithms = []algorithm{
	{
		name: "LZ4", id: LZ4, maxChunk: maxBlock, bound: asInt64(lz4.Bound),
		encode: func(dst, src []byte, _ *Spec) ([]byte, error) { return lz4.Encode(dst, src) },
		decode: lz4.Decode, size: lz4.Size, most: atMostTimes(255),
	},
	{
		name: "Snappy", id: Snappy, maxChunk: maxBlock, bound: asInt64(snappy.Bound),
		encode: func(dst, src []byte, _ *Spec) ([]byte, error) { return snappy.Encode(dst, src) },
		decode: snappy.Decode, size: snappy.Size, most: atMostTimes(32),
	},
	{
		name: "Zstd", id: Zstd, maxChunk: maxBlock, bound: asInt64(zstd.Bound),
		encode: func(dst, src []byte, _ *Spec) ([]byte, error) { return zstd.Encode(dst, src) },
		decode: zstd.Decode, size: zstd.Size, most: zstd.Size, // cheap for frames that state their size
	},
	deflateAlgorithm("Deflate", Deflate, false),
	deflateAlgorithm("Gzip", Gzip, true),
	{
		name: "GDeflate", id: GDeflate, maxChunk: maxBlock, bound: asInt64(gdeflate.Bound),
		encode: func(dst, src []byte, s *Spec) ([]byte, error) { return gdeflate.Encode(dst, src, s.Level) },
		decode: gdeflate.Decode, size: gdeflate.Size, most: atMostTimes(gdeflate.MaxRatio),
	},
	{
		name: "X16", id: X16, maxChunk: maxBlock, bound: x16Bound,
		encode: x16Encode, decode: x16Decode, size: x16Size, most: x16Size,
	},
	{
		name: "Cascaded", id: Cascaded, maxChunk: maxBlock, bound: asInt64(cascaded.Bound),
		encode: func(dst, src []byte, s *Spec) ([]byte, error) { return cascaded.Encode(dst, src, *s.Cascaded) },
		decode: cascaded.Decode, size: cascaded.Size, most: atMostTimes(cascaded.MaxRatio),
	},
	{name: "ANS", id: ANS},
	{name: "Bitcomp", id: Bitcomp},
}

// Names returns the algorithms that this package encodes and decodes.
func Names() []string {
	var names []string
	for _, a := range algorithms {
		if a.decode != nil {
			names = append(names, a.name)
		}
	}
	return names
}

// byName finds an algorithm by its name, ignoring case.
func byName(name string) (*algorithm, error) {
	i := slices.IndexFunc(algorithms, func(a algorithm) bool { return strings.EqualFold(a.name, name) })
	if i < 0 {
		return nil, errs.New(errs.ErrArgument, "unknown algorithm %q: expected one of %s",
			name, strings.Join(Names(), ", "))
	}
	return checkSupported(&algorithms[i])
}

func byID(id Algorithm) (*algorithm, error) {
	i := slices.IndexFunc(algorithms, func(a algorithm) bool { return a.id == id })
	if i < 0 {
		return nil, errs.New(errs.ErrFormat, "the header of a native stream has an unknown algorithm: %d", id)
	}
	return checkSupported(&algorithms[i])
}

// checkSupported refuses an algorithm if only its name is known.
func checkSupported(a *algorithm) (*algorithm, error) {
	if a.decode == nil {
		return nil, errs.New(errs.ErrNotSupported, "%s streams are not supported", a.name)
	}
	return a, nil
}

// prefixBytes returns the number of bytes before the block of a WithSize stream.
func (a *algorithm) prefixBytes() int {
	if a.id == LZ4 {
		return 4
	}
	return 8
}

// readPrefix returns the content length in the prefix of a WithSize stream.
func readPrefix(p []byte) uint64 {
	if len(p) == 4 {
		return uint64(binary.LittleEndian.Uint32(p))
	}
	return binary.LittleEndian.Uint64(p)
}

// checkLength refuses a content length that the block src cannot have.
func (a *algorithm) checkLength(src []byte, n int64) error {
	most, err := a.most(src)
	if err != nil {
		return err
	}
	if n < 0 || n > most {
		return errs.New(errs.ErrCorrupt, "%d bytes of %s cannot decode to %d bytes", len(src), a.name, n)
	}
	return nil
}

// paddedBytes returns the size of a stored chunk in a payload, with padding.
func (a *algorithm) paddedBytes(n int64) int64 {
	if a.id == X16 {
		return (n + 15) &^ 15
	}
	return (n + 7) &^ 7
}

// mostRatio returns an upper bound for the number of bytes that one byte of a block decodes to.
func (a *algorithm) mostRatio() int64 {
	switch a.id {
	case Zstd:
		return 128 << 10 / 4 // a block that repeats one byte
	case X16:
		return 1 << 20
	}
	n, _ := a.most(make([]byte, 1))
	return n
}

// A block is one block of a stream, with its position in the content.
type block struct {
	src      []byte
	at, n    int64
	stored   uint32 // checksum of src, if the stream has checksums
	contents uint32 // checksum of the block's content
}

// A layout describes a stream that was parsed but not decoded yet.
type layout struct {
	algo   *algorithm
	size   int64
	blocks []block
	// summed means that the blocks have checksums, which must be compared.
	summed bool
	// damaged means that the checksum of the header does not match. The stream is decoded anyway, for callers that
	// want the bytes.
	damaged bool
}

// parseStream parses a stream: its kind, the length of its content, and the offsets of its blocks. It allocates at
// most as many blocks as the stream's bytes can contain.
func parseStream(src []byte, s *Spec, algo *algorithm) (layout, error) {
	if s.Kind == Native {
		return parseNative(src, s, algo)
	}
	if algo == nil {
		return layout{}, errs.New(errs.ErrArgument, "name the algorithm: only native streams contain its name")
	}
	if s.Kind == Raw {
		n, err := algo.size(src)
		if err != nil {
			return layout{}, err
		}
		return layout{algo: algo, size: n, blocks: []block{{src: src, n: n}}}, nil
	}
	k := algo.prefixBytes()
	if len(src) < k {
		return layout{}, errs.New(errs.ErrCorrupt,
			"the stream has %d bytes, which is too short for the length of the content", len(src))
	}
	n, rest := readPrefix(src[:k]), src[k:]
	if n > 1<<62 {
		return layout{}, errs.New(errs.ErrCorrupt, "the content is too large: %d bytes", n)
	}
	if err := algo.checkLength(rest, int64(n)); err != nil {
		return layout{}, err
	}
	return layout{algo: algo, size: int64(n), blocks: []block{{src: rest, n: int64(n)}}}, nil
}
