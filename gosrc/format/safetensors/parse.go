package safetensors

// This file parses the JSON of a header, and checks its tensors against the rules of the format.

import (
	"bytes"
	"cmp"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A parser accepts exactly the grammar of the header. Tensors share memory blocks for their names and shapes. Blocks
// never grow, so the heap stays within a small multiple of the header, and tensors need no separate allocations.
type parser struct {
	scanner
	data     int64
	tensor   string // the tensor being read
	tensors  []tensor.Tensor
	metadata map[string]string
	said     bool // whether "__metadata__" has occurred
	names    strings.Builder
	dims     []int64
}

func (p *parser) parseHeader() error {
	if i := invalidUTF8(p.b[p.p:]); i >= 0 {
		p.bad = p.p + i
		return errs.OfRule("InvalidHeader", errs.ErrFormat, "the header is not UTF-8")
	}
	// Each tensor has a closing brace and takes at least minEntry bytes.
	body := p.b[p.p:]
	p.tensors = make([]tensor.Tensor, 0, min(bytes.Count(body, []byte{'}'}), len(body)/minEntry+1))
	for more := p.openList('{', '}'); more; more = p.hasMore('}') {
		if !p.parseMember() {
			break
		}
	}
	if p.err == nil && (p.space() != 0 || p.p < len(p.b)) {
		p.failWith("bytes after the header's object")
	}
	return p.err
}

func invalidUTF8(b []byte) int {
	if utf8.Valid(b) {
		return -1
	}
	for i := 0; i < len(b); {
		r, n := utf8.DecodeRune(b[i:])
		if r == utf8.RuneError && n <= 1 {
			return i
		}
		i += n
	}
	return -1
}

// parseMember reads a name and its value.
func (p *parser) parseMember() bool {
	name, ok := p.readString()
	if !ok {
		return false
	}
	if string(name) == MetadataKey {
		return p.takeByte(':') && p.parseMetadata()
	}
	p.tensor = p.internName(name)
	if !p.takeByte(':') || !p.parseEntry() {
		return false
	}
	p.tensor = ""
	return true
}

// internName copies a name into a block.
func (p *parser) internName(name []byte) string {
	if p.names.Cap()-p.names.Len() < len(name) {
		// The rest of the header bounds the size of the remaining names.
		p.names = strings.Builder{}
		p.names.Grow(max(len(name), min(64<<10, len(p.b)-p.p)))
	}
	from := p.names.Len()
	p.names.Write(name)
	return p.names.String()[from:] // stays valid because the block never moves
}

// shape copies dims into a block.
func (p *parser) shape(dims []int64) []int64 {
	if len(dims) == 0 {
		return []int64{}
	}
	if cap(p.dims)-len(p.dims) < len(dims) {
		p.dims = make([]int64, 0, max(len(dims), min(4096, (len(p.b)-p.p)/32)))
	}
	from := len(p.dims)
	p.dims = append(p.dims, dims...)
	return p.dims[from:len(p.dims):len(p.dims)]
}

// parseMetadata reads the value of "__metadata__": an object of strings, or null, which means no metadata.
func (p *parser) parseMetadata() bool {
	if p.said && !p.lenient {
		return p.failWith("duplicate field `%s`", MetadataKey)
	}
	p.said, p.metadata = true, nil
	if c := p.space(); c == 'n' || c != '{' && p.lenient {
		from := p.p
		if !p.skipValue(2) {
			return false
		}
		if p.lenient || string(p.b[from:p.p]) == "null" {
			return true
		}
		return p.failWith("metadata is not an object")
	}
	p.metadata = map[string]string{}
	for more := p.openList('{', '}'); more; more = p.hasMore('}') {
		raw, ok := p.readString()
		if !ok {
			return false
		}
		key := string(raw)
		if _, twice := p.metadata[key]; twice && !p.lenient {
			return p.failWith("duplicate metadata key %q", key)
		}
		if !p.takeByte(':') {
			return false
		}
		switch c := p.space(); {
		case c == '"':
			if raw, ok = p.readString(); !ok {
				return false
			}
			p.metadata[key] = string(raw)
		case p.lenient:
			from := p.p
			if !p.skipValue(3) {
				return false
			}
			p.metadata[key] = string(p.b[from:p.p])
		default:
			return p.failWith("metadata %q is not a string", key)
		}
		if len(p.metadata) > maxMetadata {
			return p.failWith("more than %d entries of metadata", maxMetadata)
		}
	}
	return p.err == nil
}

// These bits record which fields of an entry have occurred.
const (
	hasDType = 1 << iota
	hasShape
	hasOffsets
)

// parseEntry reads one tensor. It sets Off and Stored from data_offsets, relative to the data section. checkTensors
// checks them later.
func (p *parser) parseEntry() bool {
	t := tensor.Tensor{Name: p.tensor, Alias: -1, Plain: true}
	count, base := 0, len(p.keys)
	for more := p.openList('{', '}'); more; more = p.hasMore('}') {
		p.space()
		lo := p.p
		key, ok := p.readString()
		if !ok {
			return false
		}
		field := 0
		switch string(key) {
		case "dtype":
			field = hasDType
		case "shape":
			field = hasShape
		case "data_offsets":
			field = hasOffsets
		default:
			p.keys = append(p.keys, span{uint32(lo), uint32(p.p)})
		}
		if count&field != 0 && !p.lenient {
			return p.failWith("duplicate field `%s`", key)
		}
		count |= field
		if !p.takeByte(':') {
			return false
		}
		switch field {
		case hasDType:
			ok = p.dtype(&t)
		case hasShape:
			ok = p.readShape(&t)
		case hasOffsets:
			ok = p.parseOffsets(&t)
		default:
			ok = p.skipValue(3)
		}
		if !ok {
			return false
		}
	}
	if p.err != nil || !p.checkDistinct(base) {
		return false
	}
	if count != hasDType|hasShape|hasOffsets {
		for i, name := range []string{"dtype", "shape", "data_offsets"} {
			if count&(1<<i) == 0 {
				return p.failWith("missing field `%s`", name)
			}
		}
	}
	p.tensors = append(p.tensors, t)
	return true
}

func (p *parser) dtype(t *tensor.Tensor) bool {
	name, ok := p.readString()
	if !ok {
		return false
	}
	if t.DType, ok = tensor.ParseDType(string(name)); !ok {
		return p.failWith("unknown dtype %q", name)
	}
	return true
}

func (p *parser) readShape(t *tensor.Tensor) bool {
	var dims [tensor.MaxRank]int64
	n := 0
	for more := p.openList('[', ']'); more; more = p.hasMore(']') {
		d, over, ok := p.readUnsigned()
		if !ok {
			return false
		}
		if over {
			p.failWith("a dimension is 2^63 or more")
			p.err = errs.OfRule("ValidationOverflow", errs.ErrFormat, "a dimension is 2^63 or more")
			return false
		}
		if n == len(dims) {
			return p.failWith("rank is more than %d", len(dims))
		}
		dims[n] = d
		n++
	}
	t.Shape = p.shape(dims[:n])
	return p.err == nil
}

func (p *parser) parseOffsets(t *tensor.Tensor) bool {
	if !p.takeByte('[') {
		return false
	}
	begin, over1, ok := p.readUnsigned()
	if !ok || !p.takeByte(',') {
		return false
	}
	end, over2, ok := p.readUnsigned()
	if !ok || !p.takeByte(']') {
		return false
	}
	if over1 || over2 {
		p.failWith("an offset is 2^63 or more")
		p.err = errs.OfRule("InvalidOffset", errs.ErrFormat, "an offset is 2^63 or more")
		return false
	}
	t.Off, t.Stored = begin, end-begin
	return true
}

// checkTensors checks the parsed tensors against the rules of the format, in the same order as the safetensors
// library, and sets their final order and offsets.
func (h *Header) checkTensors(uri string, size int64, opt Options) error {
	if err := h.checkUnique(uri, opt); err != nil {
		return err
	}
	h.takeNotice()
	order := func(a, b *tensor.Tensor) int {
		if a.Off != b.Off {
			return cmp.Compare(a.Off, b.Off)
		}
		if a.Stored != b.Stored {
			return cmp.Compare(a.Stored, b.Stored)
		}
		return strings.Compare(a.Name, b.Name)
	}
	ts := h.Tensors
	for i := 1; i < len(ts); i++ {
		if order(&ts[i-1], &ts[i]) > 0 { // most writers sort, so this is rare
			sorted := make([]*tensor.Tensor, len(ts))
			for k := range ts {
				sorted[k] = &ts[k]
			}
			slices.SortFunc(sorted, order)
			ts = make([]tensor.Tensor, len(sorted))
			for k, t := range sorted {
				ts[k] = *t
			}
			h.Tensors = ts
			break
		}
	}
	end := int64(0)
	for i := range ts {
		t := &ts[i] // so far, Off is the header's begin and Stored its end - begin
		at := h.Data + t.Off
		if t.Off != end || t.Stored < 0 {
			return locateError(uri, t.Name, at, errs.OfRule("InvalidOffset", errs.ErrFormat,
				"its bytes are [%d, %d) of the data section, expected to begin at %d", t.Off, t.Off+t.Stored, end))
		}
		end += t.Stored
		bytes, err := tensor.Size(t.DType, t.Shape)
		if err != nil {
			return locateError(uri, t.Name, at, err)
		}
		if bytes != t.Stored {
			return locateError(uri, t.Name, at, errs.OfRule("TensorInvalidInfo", errs.ErrFormat,
				"it has %d bytes, but shape %v of %v takes %d", t.Stored, t.Shape, t.DType, bytes))
		}
		t.Off, t.Bytes = at, bytes
	}
	have := size - h.Data // not negative, because Length checked it
	if end > have {
		return locateError(uri, "", size, errs.OfRule("MetadataIncompleteBuffer", errs.ErrCorrupt,
			"truncated: the file has %d of %d bytes; copy or fetch it again", size, uint64(h.Data)+uint64(end)))
	}
	if end < have && !opt.Lenient {
		return locateError(uri, "", h.Data+end, errs.OfRule("MetadataIncompleteBuffer", errs.ErrFormat,
			"the file has %d bytes after the last tensor", have-end))
	}
	return nil
}

// takeNotice removes the notice from the tensors of a container. A second notice stays there and is refused.
func (h *Header) takeNotice() {
	_, isMarked := h.Metadata[ContainerKey]
	endsThere := func(t tensor.Tensor) bool { return t.Off == 0 && t.Stored == noticeAt } // only in plain files
	if !isMarked || slices.ContainsFunc(h.Tensors, endsThere) {
		return
	}
	for i := range h.Tensors {
		t := &h.Tensors[i]
		if t.Off == noticeAt && t.Stored == 0 && t.DType == tensor.U8 && slices.Equal(t.Shape, []int64{0}) {
			h.Notice = t.Name
			h.Tensors = slices.Delete(h.Tensors, i, i+1)
			return
		}
	}
}

// checkUnique refuses two tensors with the same name. In lenient mode it keeps the last one.
func (h *Header) checkUnique(uri string, opt Options) error {
	i := tensor.Duplicate(h.Tensors)
	if i < 0 {
		return nil
	}
	if !opt.Lenient {
		return locateError(uri, h.Tensors[i].Name, -1, errs.OfRule("InvalidHeaderDeserialization", errs.ErrFormat,
			"two tensors have this name"))
	}
	last := make(map[string]int, len(h.Tensors))
	for i := range h.Tensors {
		last[h.Tensors[i].Name] = i
	}
	tensors := h.Tensors[:0]
	for i, t := range h.Tensors {
		if last[t.Name] == i {
			tensors = append(tensors, t)
		}
	}
	h.Tensors = tensors
	return nil
}
