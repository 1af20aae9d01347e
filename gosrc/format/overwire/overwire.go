// Package overwire reads and writes the index of overwire containers. A container is a
// safetensors file. Its first tensor, "overwire.index", says how the others are stored:
//
//	u64 N | N bytes of JSON | index | compressed tensors | plain tensors
//	                          |
//	                          header 64 | dims u64 each | tensors 64 each | chunks 32 each | CRC32C, padding
//
// Specification: docs/format.md sections 1, 2 and 4; nothing else writes this format.
// This package encodes and decodes the index. tensor.Index.Validate, which Decode
// calls, checks its values.
package overwire

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"hash/crc32"
	"maps"
	"math"
	"strconv"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	// IndexName is the tensor with the index. No other tensor may have this name.
	IndexName = "overwire.index"
	// MetadataKey is the metadata entry that marks a file as a container.
	MetadataKey = "overwire"

	// Major and Minor are the newest version that we write. A file has the smallest minor
	// version that its features need: 0, 1 with an Origin, 2 with features, or 3 with digests. A
	// reader refuses another major version and accepts a larger minor one. No release has
	// written major 0.
	Major, Minor = 1, 3

	// DataAlign divides the offset of the data section.
	DataAlign = 4096

	magic       = "OWIX"
	headerSize  = 64
	tensorSize  = 64
	chunkSize   = 32
	trailerSize = 8
	noAlias     = math.MaxUint32
)

// The layouts of a tensor record.
const (
	layoutChunks = iota
	layoutPlain
	layoutAlias
)

var (
	le         = binary.LittleEndian
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
)

// The critical features, which readers of 1.1 cannot decode.
const (
	featureWide   = 1 << 0 // X16 chunks of integers of several bytes
	featurePlanes = 1 << 1 // chunks of codec 6
	featuresKnown = featureWide | featurePlanes
)

// featuresOf returns the critical features that the chunks of a file need.
func featuresOf(ts []tensor.Tensor, chunks []tensor.Chunk) (need uint64) {
	for i := range ts {
		t := &ts[i]
		for _, c := range chunks[t.First : t.First+t.Count] {
			switch {
			case c.Codec == tensor.CodecPlanes:
				need |= featurePlanes
			case c.Codec == tensor.CodecX16 && t.DType.Wide():
				need |= featureWide
			}
		}
	}
	return need
}

// minorVersion returns the smallest minor version for a file with the given origin,
// features and digests.
func minorVersion(o *Origin, features uint64, digests string) int {
	switch {
	case digests != "":
		return 3
	case features != 0:
		return 2
	case o != nil:
		return 1
	}
	return 0
}

// note is for people who look at a file, or who find tensors of bytes in it with
// another reader. Readers ignore it.
const note = "compressed by overwire; to read it: pip install overwire; to have plain safetensors: overwire decompress"

// markOf returns the value of the metadata entry. empty says that the user's metadata exist
// and are empty, not absent.
func markOf(o *Origin, features uint64, digests string, empty bool) string {
	return encodeMark(minorVersion(o, features, digests), note, o, digests, empty)
}

func encodeMark(minor int, note string, o *Origin, digests string, empty bool) string {
	var metadata *struct{}
	if empty {
		metadata = &struct{}{}
	}
	text, _ := json.Marshal(struct { // cannot fail
		Format   string    `json:"format"`
		Index    string    `json:"index"`
		Note     string    `json:"note"`
		Metadata *struct{} `json:"metadata,omitempty"`
		Digests  string    `json:"digests,omitempty"`
		Origin   *Origin   `json:"origin,omitempty"`
	}{strconv.Itoa(Major) + "." + strconv.Itoa(minor), IndexName, note, metadata, digests, o})
	return string(text)
}

// userMetadata returns the entries of a container's metadata without ours. It is nil if
// there are none, unless the mark says that they are empty.
func userMetadata(all map[string]string) map[string]string {
	value := all[MetadataKey]
	if len(all) == 1 && !strings.Contains(value, `,"metadata":{}`) {
		return nil
	}
	users := maps.Clone(all)
	delete(users, MetadataKey)
	return users
}

// Is reports whether a file is an overwire container. It refuses a file that has the
// mark without the index, or the index without the mark: such a header has changed, and
// its blobs are not tensors of bytes.
func Is(h *safetensors.Header) (bool, error) {
	value, hasMark := h.Metadata[MetadataKey]
	hasIndex := false
	for i := range h.Tensors {
		if h.Tensors[i].Name == IndexName {
			hasIndex = true
			break
		}
	}
	switch {
	case !hasMark && !hasIndex:
		return false, nil
	case !hasMark:
		return false, errs.New(errs.ErrCorrupt, "the tensor %s is there, but not the metadata entry %q",
			IndexName, MetadataKey)
	}
	// The last members may be long, and loading does not need them.
	for _, member := range []string{`,"digests":`, `,"origin":`} {
		if head, _, cut := strings.Cut(value, member); cut {
			value = head + "}"
		}
	}
	format, index, err := readMark(value)
	if err != nil {
		if !hasIndex {
			return false, nil // another program's entry
		}
		return false, errs.New(errs.ErrCorrupt, "metadata entry %q: %v", MetadataKey, err)
	}
	major, minor, _ := strings.Cut(format, ".")
	major64, err := strconv.ParseUint(major, 10, 16)
	if _, err2 := strconv.ParseUint(minor, 10, 16); err != nil || err2 != nil {
		return false, errs.New(errs.ErrCorrupt, "metadata entry %q: format %q", MetadataKey, format)
	}
	if major64 != Major {
		return false, errs.New(errs.ErrNotSupported, "format %s, this overwire reads %d: %s", format, Major,
			remedyFor(major64))
	}
	if index != IndexName || !hasIndex {
		return false, errs.New(errs.ErrCorrupt, "the index %q is missing", index)
	}
	return true, nil
}

// readMark returns two members of a metadata entry, "" for a missing one. It uses a map, because struct
// fields would also match names in other cases.
func readMark(value string) (format, index string, err error) {
	var m map[string]json.RawMessage
	if err := json.Unmarshal([]byte(value), &m); err != nil {
		return "", "", err
	}
	if m == nil {
		return "", "", errs.New(errs.ErrFormat, "null")
	}
	for key, text := range map[string]*string{"format": &format, "index": &index} {
		if raw, ok := m[key]; ok {
			if err := json.Unmarshal(raw, text); err != nil {
				return "", "", err
			}
		}
	}
	return format, index, nil
}

// remedyFor says what to do about a file of another major version.
func remedyFor(major uint64) string {
	if major < Major {
		return "it is a draft from before the first release; compress the model again"
	}
	return "upgrade overwire"
}

// blobSize returns the bytes of an index. It does not overflow.
func blobSize(tensors, chunks, dims uint64) uint64 {
	return sizes.RoundUp(headerSize+8*dims+tensorSize*tensors+chunkSize*chunks+trailerSize, tensor.BlobAlign)
}

// A record is a decoded tensor record.
type record struct {
	dtype      tensor.DType
	rank       int
	layout     uint8
	parts      uint8
	chunkBytes uint32
	bytes      uint64
	stored     uint64
	first      uint32
	count      uint32
	hash       [16]byte
	alias      uint32
}

func (r *record) appendRecord(dst []byte) []byte {
	dst = append(dst, byte(r.dtype), byte(r.rank), r.layout, r.parts)
	dst = le.AppendUint32(dst, r.chunkBytes)
	dst = le.AppendUint64(dst, r.bytes)
	dst = le.AppendUint64(dst, r.stored)
	dst = le.AppendUint32(dst, r.first)
	dst = le.AppendUint32(dst, r.count)
	dst = append(dst, r.hash[:]...)
	dst = le.AppendUint32(dst, r.alias)
	return append(dst, make([]byte, 12)...)
}

func (r *record) readRecord(b []byte) {
	*r = record{
		dtype: tensor.DType(b[0]), rank: int(b[1]), layout: b[2], parts: b[3],
		chunkBytes: le.Uint32(b[4:]), bytes: le.Uint64(b[8:]), stored: le.Uint64(b[16:]),
		first: le.Uint32(b[24:]), count: le.Uint32(b[28:]), hash: [16]byte(b[32:]), alias: le.Uint32(b[48:]),
	}
}

// Append appends the index of a file to dst, in the smallest minor version for its chunks, origin and
// digests. ts and chunks are valid, belong to one source, and are numbered from 0. head is everything
// before the data section, which the index checksums.
func Append(dst []byte, ts []tensor.Tensor, chunks []tensor.Chunk, head []byte, o *Origin, digests string) []byte {
	dims := 0
	for i := range ts {
		dims += len(ts[i].Shape)
	}
	need := featuresOf(ts, chunks)
	start := len(dst)
	dst = appendFrame(dst, minorVersion(o, need, digests), need, len(ts), len(chunks), dims, head)
	for i := range ts {
		for _, d := range ts[i].Shape {
			dst = le.AppendUint64(dst, uint64(d))
		}
	}
	for i := range ts {
		t := &ts[i]
		r := record{dtype: t.DType, rank: len(t.Shape), layout: layoutChunks, parts: max(1, t.Parts),
			chunkBytes: t.ChunkBytes,
			bytes:      uint64(t.Bytes), stored: uint64(t.Stored), first: uint32(t.First), count: uint32(t.Count),
			hash: t.Hash, alias: noAlias}
		switch {
		case t.Alias >= 0:
			r.layout, r.alias = layoutAlias, uint32(t.Alias)
		case t.Plain:
			r.layout = layoutPlain
		}
		dst = r.appendRecord(dst)
	}
	for i := range chunks {
		c := &chunks[i]
		dst = le.AppendUint64(dst, uint64(c.Off))
		dst = le.AppendUint32(dst, c.Stored)
		dst = le.AppendUint32(dst, c.Logical)
		dst = le.AppendUint32(dst, c.Sum)
		dst = append(dst, byte(c.Codec), c.Transform, 0, 0)
		dst = le.AppendUint16(dst, c.SegTiles)
		dst = append(dst, 0, 0, 0, 0, 0, 0)
	}
	return appendTrailer(dst, start)
}

// appendFrame appends the header of an index.
func appendFrame(dst []byte, minor int, features uint64, tensors, chunks, dims int, head []byte) []byte {
	dst = append(dst, magic...)
	dst = le.AppendUint16(dst, Major)
	dst = le.AppendUint16(dst, uint16(minor))
	dst = le.AppendUint64(dst, features)
	dst = le.AppendUint32(dst, uint32(tensors))
	dst = le.AppendUint32(dst, uint32(chunks))
	dst = le.AppendUint32(dst, uint32(dims))
	dst = le.AppendUint16(dst, tensorSize)
	dst = le.AppendUint16(dst, chunkSize)
	dst = le.AppendUint64(dst, blobSize(uint64(tensors), uint64(chunks), uint64(dims)))
	dst = le.AppendUint32(dst, crc32.Checksum(head, castagnoli))
	return append(dst, make([]byte, 20)...)
}

// appendTrailer appends the trailer of an index that begins at start.
func appendTrailer(dst []byte, start int) []byte {
	dst = le.AppendUint32(dst, crc32.Checksum(dst[start:], castagnoli))
	return append(dst, make([]byte, start+int(le.Uint64(dst[start+32:]))-len(dst))...)
}

// allZero checks reserved bytes.
func allZero(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }
