package safetensors

// This file writes headers.

import (
	"encoding/binary"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

// An Entry is one tensor of a header to write. Begin and End are relative to the data section.
type Entry struct {
	Name       string
	DType      tensor.DType
	Shape      []int64
	Begin, End int64
}

// noticeAt is the offset of a notice. No tensor can begin there, because the index of a container has more bytes.
const noticeAt = 1

// NoticeEntry returns an entry without bytes. All versions of the safetensors library refuse it, with a message that
// contains the entry's name. Only containers may have it.
func NoticeEntry(name string) Entry {
	return Entry{Name: name, DType: tensor.U8, Shape: []int64{0}, Begin: noticeAt, End: noticeAt}
}

func (e *Entry) isNotice(metadata map[string]string) bool {
	_, isContainer := metadata[ContainerKey]
	return isContainer && e.Begin == noticeAt && e.End == noticeAt && e.DType == tensor.U8 &&
		slices.Equal(e.Shape, []int64{0})
}

// Place sets Begin and End of the entries without gaps and returns the size of the data section. A shape that is too
// large for a file gives errs.ErrArgument.
func Place(entries []Entry) (int64, error) {
	end := int64(0)
	for i := range entries {
		e := &entries[i]
		n, err := tensor.Size(e.DType, e.Shape)
		if err != nil || n > 1<<62-end {
			return 0, refuseEntry(e.Name, "shape %v of %v: %v", e.Shape, e.DType, err)
		}
		e.Begin, end = end, end+n
		e.End = end
	}
	return end, nil
}

// AppendHeader appends N and the header's JSON to dst. It pads with spaces until 8 + N is a multiple of padTo; 0
// means 8, as in safetensors. Metadata comes first, sorted by key, then the entries in the given order, which must be
// the order of their bytes. The same input always gives the same bytes.
//
// Input that Parse would refuse gives errs.ErrArgument.
func AppendHeader(dst []byte, metadata map[string]string, entries []Entry, padTo int) ([]byte, error) {
	if err := checkWritable(metadata, entries); err != nil {
		return dst, err
	}
	start := len(dst)
	dst = append(dst, 0, 0, 0, 0, 0, 0, 0, 0, '{')
	dst = appendMetadata(dst, metadata)
	for i := range entries {
		dst = appendEntry(dst, &entries[i])
	}
	if dst[len(dst)-1] == ',' {
		dst = dst[:len(dst)-1]
	}
	dst = append(dst, '}')
	if padTo <= 0 {
		padTo = 8
	}
	if over := (len(dst) - start) % padTo; over != 0 {
		dst = append(dst, strings.Repeat(" ", padTo-over)...)
	}
	n := len(dst) - start - 8
	if n > tensor.MaxHeader {
		return dst[:start], errs.OfRule("HeaderTooLarge", errs.ErrArgument,
			"the header has %d bytes, but at most %d can be read: write shards", n, tensor.MaxHeader)
	}
	binary.LittleEndian.PutUint64(dst[start:], uint64(n))
	return dst, nil
}

// HeaderBound returns the maximum number of bytes that AppendHeader appends for these entries before padding, for any
// offsets up to limit. An unknown shape must have its largest possible values. A writer can use this bound to reserve
// space for a header that it writes last.
func HeaderBound(metadata map[string]string, entries []Entry, limit int64) int64 {
	scratch := appendMetadata(nil, metadata)
	n := int64(8+len("{}")) + int64(len(scratch))
	for _, e := range entries {
		e.Begin, e.End = limit, limit
		scratch = appendEntry(scratch[:0], &e)
		n += int64(len(scratch))
	}
	return n
}

func checkWritable(metadata map[string]string, entries []Entry) error {
	for k, v := range metadata {
		if !utf8.ValidString(k) || !utf8.ValidString(v) {
			return errs.New(errs.ErrArgument, "metadata %q is not valid UTF-8", k)
		}
	}
	if len(metadata) > maxMetadata {
		return errs.New(errs.ErrArgument, "metadata has %d entries: expected at most %d", len(metadata), maxMetadata)
	}
	names := make(map[string]struct{}, len(entries))
	end := int64(0)
	for i := range entries {
		e := &entries[i]
		if !utf8.ValidString(e.Name) || e.Name == MetadataKey {
			return refuseEntry(e.Name, "invalid name for a tensor")
		}
		names[e.Name] = struct{}{}
		if len(names) != i+1 {
			return refuseEntry(e.Name, "two tensors have this name")
		}
		if len(e.Shape) > tensor.MaxRank {
			return refuseEntry(e.Name, "rank %d is more than the maximum, %d", len(e.Shape), tensor.MaxRank)
		}
		if e.isNotice(metadata) {
			continue
		}
		n, err := tensor.Size(e.DType, e.Shape)
		if err != nil {
			return refuseEntry(e.Name, "%v", err)
		}
		if e.Begin != end || e.End < e.Begin || e.End-e.Begin != n {
			return refuseEntry(e.Name, "its bytes [%d, %d) do not start at %d or do not fit shape %v of %v",
				e.Begin, e.End, end, e.Shape, e.DType)
		}
		end = e.End
	}
	return nil
}

func refuseEntry(name, format string, args ...any) error {
	return errs.Locate("save", "", name, -1, errs.New(errs.ErrArgument, format, args...))
}

func appendMetadata(dst []byte, metadata map[string]string) []byte {
	if metadata == nil {
		return dst
	}
	dst = append(dst, `"`+MetadataKey+`":{`...)
	for i, key := range slices.Sorted(maps.Keys(metadata)) {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = AppendString(dst, key)
		dst = append(dst, ':')
		dst = AppendString(dst, metadata[key])
	}
	return append(dst, '}', ',')
}

func appendEntry(dst []byte, e *Entry) []byte {
	dst = AppendString(dst, e.Name)
	dst = append(dst, `:{"dtype":"`...)
	dst = append(dst, e.DType.String()...)
	dst = append(dst, `","shape":[`...)
	for i, d := range e.Shape {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendInt(dst, d, 10)
	}
	dst = append(dst, `],"data_offsets":[`...)
	dst = strconv.AppendInt(dst, e.Begin, 10)
	dst = append(dst, ',')
	dst = strconv.AppendInt(dst, e.End, 10)
	return append(dst, ']', '}', ',')
}

// AppendString appends s as a JSON string. Like serde_json, it escapes only characters for which JSON requires it. s
// must be UTF-8.
func AppendString(dst []byte, s string) []byte {
	const hex = "0123456789abcdef"
	dst = append(dst, '"')
	from := 0
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c >= 0x20 && c != '"' && c != '\\' {
			continue
		}
		dst = append(dst, s[from:i]...)
		from = i + 1
		switch c {
		case '"', '\\':
			dst = append(dst, '\\', c)
		case '\b':
			dst = append(dst, '\\', 'b')
		case '\f':
			dst = append(dst, '\\', 'f')
		case '\n':
			dst = append(dst, '\\', 'n')
		case '\r':
			dst = append(dst, '\\', 'r')
		case '\t':
			dst = append(dst, '\\', 't')
		default:
			dst = append(dst, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		}
	}
	return append(append(dst, s[from:]...), '"')
}
