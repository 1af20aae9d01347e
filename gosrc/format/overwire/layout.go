package overwire

// This file lays out a container that is being written.

import (
	"cmp"
	"encoding/base64"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/tensor"
)

// An Item is a tensor to store. Its stored size is not known yet.
type Item struct {
	Name  string
	DType tensor.DType
	Shape []int64
	// Plain means that the tensor is stored so that any safetensors reader can read it. Tensors without bytes are
	// always plain.
	Plain bool
	// Alias is 1 + the number of the item with the same bytes, or 0.
	Alias int
	// Parts is the number of column parts; 0 means 1. It is 1 for plain tensors.
	Parts int
	// ChunkBytes is the logical size of a chunk. It is unused for aliases and tensors without bytes.
	ChunkBytes int64
}

// A Layout is a container that is being written. All counts, the size of the index, and the space for the header are
// fixed from the start. The chunks are written first, in order from Start on, then the index and the header.
//
//	l, err := NewLayout(metadata, items, origin, digests)
//	for c := range l.Chunks {        // place in this order; encode in any order
//		... encode the chunk, set Sum, Codec, Transform, SegTiles ...
//		off, err := l.Place(c, stored)
//		... write it at off; the bytes between chunks are zero ...
//	}
//	... set Hash of every tensor in l.Tensors, except aliases ...
//	front, size, err := l.Seal(known) // write front at 0; the file has size bytes
//
// The same items and chunks always give the same bytes. A Layout is not safe for concurrent use, except that several
// goroutines may set fields of different chunks.
type Layout struct {
	// Tensors are in file order. The writer sets Hash, and Place sets Off and Stored. The other fields are fixed.
	Tensors []tensor.Tensor
	// Chunks are in file order. Logical is fixed, Place sets Off and Stored, and the writer sets the other fields.
	Chunks []tensor.Chunk
	// Items[i] is the number of the item that Tensors[i] was made from.
	Items []int
	// Origin describes the file that the container is made from. It is nil if there is no such file or if the header
	// has no space for it. The writer may change its SHA256 before Seal.
	Origin *Origin

	// Digests is the text that the function Digests returns for Tensors, or "" if the container does not store
	// digests. The writer sets it before Seal; its length must not change.
	Digests string

	metadata map[string]string
	empty    bool  // whether the user's metadata is empty, but not nil
	header   int64 // bytes reserved for the header
	index    int64
	pos      int64 // offset of the next byte
	placed   int   // number of chunks that were placed
	at       int   // the tensor of the next chunk
}

// NewLayout plans a container with the user's metadata, which may be nil. It stores origin if that is not nil. If
// requested, it also stores the digest of each tensor. If the header has no space for them, it stores neither origin
// nor digests. Items that cannot be stored, and metadata with the reserved key, are errs.ErrArgument.
func NewLayout(metadata map[string]string, items []Item, origin *Origin, digests bool) (*Layout, error) {
	l := &Layout{metadata: make(map[string]string, len(metadata)+1), Origin: origin,
		empty: metadata != nil && len(metadata) == 0}
	if _, isOurs := metadata[MetadataKey]; isOurs {
		return nil, errs.New(errs.ErrArgument, "metadata entry %q is reserved", MetadataKey)
	}
	maps.Copy(l.metadata, metadata)
	if digests {
		l.Digests = strings.Repeat("A", base64.StdEncoding.EncodedLen(digestSize*len(items)))
	}
	l.metadata[MetadataKey] = markOf(origin, l.Digests, l.empty)
	each, err := itemSizes(items)
	if err != nil {
		return nil, err
	}
	l.orderItems(items, each)
	if err := l.setGrid(items, each); err != nil {
		return nil, err
	}
	// These are upper bounds, as if every chunk were raw. 2^31 chunks of 16 MiB do not overflow.
	end := l.index
	for i := range l.Tensors {
		t := &l.Tensors[i]
		switch {
		case t.Plain:
			t.Stored = t.Bytes
		case t.Alias < 0:
			t.Stored = sizes.RoundUp(t.Bytes+tensor.StoredAlign*int64(t.Count), tensor.BlobAlign)
		}
		end += t.Stored
	}
	bound := func() int64 {
		return sizes.RoundUp(safetensors.HeaderBound(l.metadata, l.headerEntries(), end), DataAlign)
	}
	if l.header = bound(); l.header-8 > tensor.MaxHeader && (l.Origin != nil || l.Digests != "") {
		l.Origin, l.Digests, l.metadata[MetadataKey] = nil, "", markOf(nil, "", l.empty)
		l.header = bound()
	}
	if l.header-8 > tensor.MaxHeader {
		return nil, errs.OfRule("HeaderTooLarge", errs.ErrArgument,
			"the header has %d bytes, but at most %d can be read: write shards", l.header, tensor.MaxHeader)
	}
	// Check that names and metadata can be stored.
	if _, err := safetensors.AppendHeader(nil, l.metadata, l.headerEntries(), DataAlign); err != nil {
		return nil, err
	}
	for i := range l.Tensors {
		l.Tensors[i].Stored = 0
	}
	l.pos = l.Start()
	l.skipPlain()
	return l, nil
}

// itemSizes checks each item separately and returns the sizes.
func itemSizes(items []Item) ([]int64, error) {
	out := make([]int64, len(items))
	if len(items) >= math.MaxInt32 {
		return nil, errs.New(errs.ErrArgument, "the model has %d tensors, but at most %d are allowed",
			len(items), math.MaxInt32-1)
	}
	for i := range items {
		it := &items[i]
		n, err := tensor.Size(it.DType, it.Shape)
		switch {
		case err != nil:
			return nil, refuseItem(it, "%v", err)
		case it.Name == IndexName || it.Name == Notice:
			return nil, refuseItem(it, "this name is reserved")
		case len(it.Shape) > tensor.MaxRank:
			return nil, refuseItem(it, "rank %d is more than the maximum, %d", len(it.Shape), tensor.MaxRank)
		case it.Alias < 0 || it.Alias > len(items):
			return nil, refuseItem(it, "it is an alias of item %d, but there are %d items", it.Alias-1, len(items))
		}
		out[i] = n
	}
	for i := range items {
		it := &items[i]
		if it.Alias == 0 {
			continue
		}
		if to := &items[it.Alias-1]; to.Alias != 0 || to.DType != it.DType || out[it.Alias-1] != out[i] || out[i] == 0 {
			return nil, refuseItem(it, "it is an alias of %q, which differs or has no bytes itself", to.Name)
		}
	}
	return out, nil
}

func refuseItem(it *Item, format string, args ...any) error {
	return errs.Locate("save", "", it.Name, -1, errs.New(errs.ErrArgument, format, args...))
}

// orderItems sorts items into the groups of docs/format.md section 1.
func (l *Layout) orderItems(items []Item, sizes []int64) {
	l.Items = make([]int, len(items))
	for i := range items {
		l.Items[i] = i
	}
	group := func(i int) int {
		it := &items[i]
		switch {
		case it.Alias != 0:
			return 64
		case !it.Plain && sizes[i] > 0:
			return 0
		case sizes[i]%tensor.BlobAlign == 0:
			return 1
		}
		return 16 - it.DType.Align() // 8..15
	}
	slices.SortFunc(l.Items, func(a, b int) int {
		if ga, gb := group(a), group(b); ga != gb {
			return ga - gb
		}
		return strings.Compare(items[a].Name, items[b].Name)
	})
	// Tensors without bytes at the end of the file all have the same data_offsets. Readers sort them by name, so they
	// are sorted by name here, regardless of group.
	tail := len(l.Items)
	for tail > 0 && (sizes[l.Items[tail-1]] == 0 || items[l.Items[tail-1]].Alias != 0) {
		tail--
	}
	slices.SortFunc(l.Items[tail:], func(a, b int) int { return cmp.Compare(items[a].Name, items[b].Name) })
}

// setGrid sets the fixed fields of Tensors and Chunks and the size of the index. It checks the size limit before it
// allocates chunks.
func (l *Layout) setGrid(items []Item, sizes []int64) error {
	place := make([]int32, len(items))
	for i, item := range l.Items {
		place[item] = int32(i)
	}
	l.Tensors = make([]tensor.Tensor, len(items))
	chunks, dims := int64(0), 0
	for i, item := range l.Items {
		it := &items[item]
		dims += len(it.Shape)
		t := &l.Tensors[i]
		*t = tensor.Tensor{Name: it.Name, Shape: it.Shape, DType: it.DType, Bytes: sizes[item], First: int32(chunks),
			Alias: -1}
		if it.Alias != 0 {
			t.Alias = place[it.Alias-1]
			continue
		}
		t.Plain = it.Plain || t.Bytes == 0
		if t.Bytes == 0 {
			continue
		}
		parts := max(1, it.Parts)
		if it.ChunkBytes <= 0 || it.ChunkBytes > tensor.MaxChunkBytes || it.ChunkBytes%tensor.ChunkAlign != 0 {
			return refuseItem(it, "invalid chunk size: %d bytes", it.ChunkBytes)
		}
		if parts > tensor.MaxColParts || parts&(parts-1) != 0 || !t.Splits(parts) || t.Plain && parts != 1 {
			return refuseItem(it, "it cannot be divided into %d column parts: its shape is %v", parts, it.Shape)
		}
		t.Parts, t.ChunkBytes = uint8(parts), uint32(it.ChunkBytes)
		n := t.Grid().Chunks()
		if chunks += n; chunks > math.MaxInt32 {
			return refuseItem(it, "the model has more than 2^31 chunks: write shards or larger chunks")
		}
		t.Count = int32(n)
	}
	l.index = int64(blobSize(uint64(len(items)), uint64(chunks), uint64(dims)))
	if l.index > tensor.MaxIndex {
		return errs.New(errs.ErrArgument, "the index has %d bytes, but at most %d can be read: write shards or "+
			"larger chunks",
			l.index, tensor.MaxIndex)
	}
	l.Chunks = make([]tensor.Chunk, chunks)
	for i := range l.Tensors {
		t := &l.Tensors[i]
		g := t.Grid()
		for k := range int64(t.Count) {
			_, lo, hi := g.Chunk(k)
			l.Chunks[int64(t.First)+k].Logical = uint32(hi - lo)
		}
	}
	return nil
}

// Header returns the size of the header, which is the offset of the data section.
func (l *Layout) Header() int64 { return l.header }

// Start returns the offset of the first chunk.
func (l *Layout) Start() int64 { return l.header + l.index }

// Place returns the offset of chunk c, which has the given stored size, and records both. Chunks must be placed in
// order.
func (l *Layout) Place(c int, stored uint32) (off int64, err error) {
	if c != l.placed || c >= len(l.Chunks) {
		return 0, errs.New(errs.ErrEngine, "chunk %d was placed out of order, after %d of %d",
			c, l.placed, len(l.Chunks))
	}
	ch := &l.Chunks[c]
	if stored == 0 || stored > ch.Logical {
		return 0, errs.New(errs.ErrEngine, "invalid stored size: %d bytes for a chunk of %d", stored, ch.Logical)
	}
	t := &l.Tensors[l.at]
	if !t.Plain {
		l.pos = sizes.RoundUp(l.pos, tensor.StoredAlign)
	}
	ch.Off, ch.Stored = l.pos, stored
	l.pos += int64(stored)
	if l.placed++; l.placed == int(t.First+t.Count) {
		if !t.Plain {
			l.pos = sizes.RoundUp(l.pos, tensor.BlobAlign)
		}
		t.Stored = l.pos - t.Off
		l.at++
		l.skipPlain()
	}
	return ch.Off, nil
}

// skipPlain skips tensors without chunks. It sets their offsets and the offset of the tensor of the next chunk.
func (l *Layout) skipPlain() {
	for ; l.at < len(l.Tensors); l.at++ {
		l.Tensors[l.at].Off = l.pos
		if l.Tensors[l.at].Count > 0 {
			return
		}
	}
}

// headerEntries returns the tensors as entries of the safetensors header, with the stored sizes that are known so far.
func (l *Layout) headerEntries() []safetensors.Entry {
	out := make([]safetensors.Entry, 0, len(l.Tensors)+2)
	out = append(out, safetensors.NoticeEntry(Notice),
		safetensors.Entry{Name: IndexName, DType: tensor.U8, Shape: []int64{l.index}, End: l.index})
	end := l.index
	for i := range l.Tensors {
		t := &l.Tensors[i]
		e := safetensors.Entry{Name: t.Name, DType: t.DType, Shape: t.Shape, Begin: end}
		if !t.Plain {
			e.DType, e.Shape = tensor.U8, []int64{t.Stored}
		}
		end += t.Stored
		e.End = end
		out = append(out, e)
	}
	return out
}

// Seal returns the bytes before the first chunk (header and index) and the size of the file. All chunks must have
// been placed. Seal validates the result like a reader. For known, see tensor.Index.Validate.
func (l *Layout) Seal(known tensor.Known) (front []byte, size int64, err error) {
	if l.placed != len(l.Chunks) {
		return nil, 0, errs.New(errs.ErrEngine, "only %d of %d chunks were placed", l.placed, len(l.Chunks))
	}
	for i := range l.Tensors {
		if a := l.Tensors[i].Alias; a >= 0 {
			l.Tensors[i].Hash = l.Tensors[a].Hash
		}
	}
	l.metadata[MetadataKey] = markOf(l.Origin, l.Digests, l.empty)
	front, err = safetensors.AppendHeader(make([]byte, 0, l.Start()), l.metadata, l.headerEntries(), int(l.header))
	if err != nil {
		return nil, 0, err
	}
	if int64(len(front)) != l.header {
		return nil, 0, errs.New(errs.ErrEngine, "the header has %d bytes, but only %d were reserved",
			len(front), l.header)
	}
	ix := tensor.Index{Sources: []tensor.Source{{Size: l.pos, Data: l.header, Format: tensor.FormatOverwire}},
		Tensors: l.Tensors, Chunks: l.Chunks}
	if err := ix.Validate(known); err != nil {
		return nil, 0, errs.New(errs.ErrEngine, "the written file would be invalid: %v", err)
	}
	return Append(front, l.Tensors, l.Chunks, front), l.pos, nil
}
