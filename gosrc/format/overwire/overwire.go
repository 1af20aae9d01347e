// Package overwire reads and writes the index of overwire containers. A container is a safetensors file with one
// entry, the notice, that makes other readers refuse it. Its first tensor, "overwire.index", describes how the other
// tensors are stored:
//
//	u64 N | N bytes of JSON | index | compressed tensors | plain tensors
//	                          |
//	                          header 64 | dims u64 each | tensors 64 each | chunks 32 each | CRC32C, padding
//
// The specification is docs/format.md sections 1, 2 and 4. No other package writes this format. This package encodes
// and decodes the index; Decode calls tensor.Index.Validate to check the values.
package overwire

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"strconv"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/internal/crc32c"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	// IndexName is the name of the tensor with the index. No other tensor may have it.
	IndexName = "overwire.index"
	// MetadataKey is the metadata entry that marks a file as a container.
	MetadataKey = safetensors.ContainerKey

	// Major and Minor are the version that this package writes. A reader refuses other major versions and accepts
	// other minor versions. No release has written major version 0.
	Major, Minor = 1, 4
	// minorNotice is the first minor version with a notice. Every later file has one, and no earlier file has.
	minorNotice = 4

	// DataAlign is the alignment of the data section's offset.
	DataAlign = 4096

	magic       = "OWIX"
	headerSize  = 64
	tensorSize  = 64
	chunkSize   = 32
	trailerSize = 8
	noAlias     = math.MaxUint32
)

// A tensor record has one of these layouts.
const (
	layoutChunks = iota
	layoutPlain
	layoutAlias
)

var le = binary.LittleEndian

// Critical features. Readers of version 1.1 cannot decode them.
const (
	featureWide   = 1 << 0 // X16 chunks of integers with more than one byte
	featurePlanes = 1 << 1 // chunks of the codec planes
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

// Notice is the name of an entry that makes readers without overwire refuse a container. They show it in their error.
// It also tells users of an older overwire what to do. It has no dot, at which some viewers split names.
const Notice = "compressed by overwire (to read it: pip install -U overwire; " +
	"to restore plain files: overwire decompress)"

// markOf returns the value of the metadata entry. empty means that the user's metadata is empty, not absent.
func markOf(o *Origin, digests string, empty bool) string {
	var metadata *struct{}
	if empty {
		metadata = &struct{}{}
	}
	text, _ := json.Marshal(struct { // cannot fail
		Format   string    `json:"format"`
		Index    string    `json:"index"`
		Metadata *struct{} `json:"metadata,omitempty"`
		Digests  string    `json:"digests,omitempty"`
		Origin   *Origin   `json:"origin,omitempty"`
	}{fmt.Sprintf("%d.%d", Major, Minor), IndexName, metadata, digests, o})
	return string(text)
}

// userMetadata returns a container's metadata without the mark. If there are no other entries, it returns nil, or an
// empty map if the mark records that the user's metadata is empty.
func userMetadata(all map[string]string) map[string]string {
	value := all[MetadataKey]
	if len(all) == 1 && !strings.Contains(value, `,"metadata":{}`) {
		return nil
	}
	users := maps.Clone(all)
	delete(users, MetadataKey)
	return users
}

// Is reports whether a file is an overwire container. It refuses a file that has only the mark or only the index: its
// header has been changed, and other readers would see compressed bytes as tensors.
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
		return false, nil // Parse sets no notice without the mark
	case !hasMark:
		return false, errs.New(errs.ErrCorrupt, "the file has the tensor %s, but not the metadata entry %q",
			IndexName, MetadataKey)
	}
	// Skip the last members: they may be long, and loading does not need them.
	for _, member := range []string{`,"digests":`, `,"origin":`} {
		if head, _, cut := strings.Cut(value, member); cut {
			value = head + "}"
		}
	}
	format, index, err := readMark(value)
	if err != nil {
		if !hasIndex {
			return false, refuseNotice(h) // another program's entry
		}
		return false, errs.New(errs.ErrCorrupt, "metadata entry %q: %v", MetadataKey, err)
	}
	major, minor, _ := strings.Cut(format, ".")
	major64, err := strconv.ParseUint(major, 10, 16)
	minor64, err2 := strconv.ParseUint(minor, 10, 16)
	if err != nil || err2 != nil {
		return false, errs.New(errs.ErrCorrupt, "metadata entry %q: invalid format %q: expected MAJOR.MINOR",
			MetadataKey, format)
	}
	if major64 != Major {
		return false, errs.New(errs.ErrNotSupported, "the format version is %s, but this overwire reads only %d.x: %s",
			format, Major, remedyFor(major64))
	}
	if index != IndexName || !hasIndex {
		return false, errs.New(errs.ErrCorrupt, "the index %q is missing", index)
	}
	if minor64 < minorNotice {
		return true, refuseNotice(h)
	}
	if h.Notice == "" {
		return false, errs.New(errs.ErrCorrupt, "the entry that makes other readers refuse the file is missing")
	}
	return true, nil
}

// refuseNotice refuses a notice in a file that must not have one, as the safetensors library does.
func refuseNotice(h *safetensors.Header) error {
	if h.Notice == "" {
		return nil
	}
	return errs.OfRule("InvalidOffset", errs.ErrFormat, "tensor %q: its bytes are [1, 1) of the data section", h.Notice)
}

// readMark returns two members of a metadata entry, or "" for a missing member. It uses a map, because struct fields
// would also match names that differ in case.
func readMark(value string) (format, index string, err error) {
	var m map[string]json.RawMessage
	if err := json.Unmarshal([]byte(value), &m); err != nil {
		return "", "", err
	}
	if m == nil {
		return "", "", errs.New(errs.ErrFormat, "it is null, not an object")
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

// remedyFor says what to do about a file with a different major version.
func remedyFor(major uint64) string {
	if major < Major {
		return "it is a draft from before the first release; compress the model again"
	}
	return "upgrade overwire"
}

// blobSize returns the size of an index in bytes. It does not overflow.
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

// Append appends the index of a file to dst. ts and chunks must be valid, belong to one source, and be numbered from
// 0. head contains everything before the data section; the index stores its checksum.
func Append(dst []byte, ts []tensor.Tensor, chunks []tensor.Chunk, head []byte) []byte {
	dims := 0
	for i := range ts {
		dims += len(ts[i].Shape)
	}
	need := featuresOf(ts, chunks)
	start := len(dst)
	dst = appendFrame(dst, need, len(ts), len(chunks), dims, head)
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
func appendFrame(dst []byte, features uint64, tensors, chunks, dims int, head []byte) []byte {
	dst = append(dst, magic...)
	dst = le.AppendUint16(dst, Major)
	dst = le.AppendUint16(dst, Minor)
	dst = le.AppendUint64(dst, features)
	dst = le.AppendUint32(dst, uint32(tensors))
	dst = le.AppendUint32(dst, uint32(chunks))
	dst = le.AppendUint32(dst, uint32(dims))
	dst = le.AppendUint16(dst, tensorSize)
	dst = le.AppendUint16(dst, chunkSize)
	dst = le.AppendUint64(dst, blobSize(uint64(tensors), uint64(chunks), uint64(dims)))
	dst = le.AppendUint32(dst, crc32c.Sum(head))
	return append(dst, make([]byte, 20)...)
}

// appendTrailer appends the trailer of the index that begins at dst[start].
func appendTrailer(dst []byte, start int) []byte {
	dst = le.AppendUint32(dst, crc32c.Sum(dst[start:]))
	return append(dst, make([]byte, start+int(le.Uint64(dst[start+32:]))-len(dst))...)
}

// allZero reports whether all bytes are zero, as reserved bytes must be.
func allZero(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }
