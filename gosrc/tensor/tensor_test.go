package tensor

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
)

// The dtypes match docs/format.md section 5: codes 1..22, names in both directions, sizes in bits, and alignment.
func TestDTypes(t *testing.T) {
	names := strings.Fields("BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ " +
		"I16 U16 F16 BF16 I32 U32 F32 C64 F64 I64 U64")
	bits := []int{8, 4, 6, 6, 8, 8, 8, 8, 8, 8, 8, 16, 16, 16, 16, 32, 32, 32, 64, 64, 64, 64}
	if len(names) != NumDTypes {
		t.Fatalf("NumDTypes is %d, want %d", NumDTypes, len(names))
	}
	for i, name := range names {
		d := DType(i + 1)
		if got, ok := ParseDType(name); !ok || got != d || d.String() != name || d.Bits() != bits[i] || !d.Valid() ||
			d.Align() != max(1, bits[i]/8) {
			t.Errorf("%s: code %d, %v, %d bits, align %d", name, got, d, d.Bits(), d.Align())
		}
	}
	for _, d := range []DType{Invalid, dtypeEnd, 255} {
		if d.Valid() || d.Bits() != 0 || d.String() != "invalid" {
			t.Errorf("dtype %d is valid", d)
		}
	}
	if _, ok := ParseDType("bf16"); ok {
		t.Error("a lowercase name was accepted")
	}
}

// Size is exact for every shape that it accepts, and rejects every overflow.
func TestSize(t *testing.T) {
	for _, c := range []struct {
		d     DType
		shape []int64
		want  int64 // -1 if rejected
		words string
	}{
		{F32, nil, 4, ""},
		{F32, []int64{0}, 0, ""},
		{F32, []int64{2, 3}, 24, ""},
		{F4, []int64{2, 3}, 3, ""},
		{F4, []int64{3}, -1, "MisalignedSlice"},
		{F6E2M3, []int64{4}, 3, ""},
		{F6E2M3, []int64{5}, -1, "MisalignedSlice"},
		{C64, []int64{5}, 40, ""},
		{U8, []int64{1<<61 - 1}, 1<<61 - 1, ""},
		{U8, []int64{1 << 61}, -1, "ValidationOverflow"},
		{F4, []int64{1 << 61}, 1 << 60, ""},
		{U8, []int64{1 << 62, 4}, -1, "ValidationOverflow"},
		{U8, []int64{1 << 62, 4, 0}, -1, "ValidationOverflow"},
		{U8, []int64{0, 1 << 62, 4}, 0, ""},
		{U8, []int64{math.MaxInt64, math.MaxInt64, math.MaxInt64}, -1, "ValidationOverflow"},
		{U8, []int64{-1}, -1, "negative"},
		{Invalid, []int64{1}, -1, "dtype"},
		{255, []int64{1}, -1, "dtype"},
	} {
		got, err := Size(c.d, c.shape)
		if c.want >= 0 && (err != nil || got != c.want) ||
			c.want < 0 && (!errors.Is(err, errs.ErrFormat) || !isSaying(err, c.words)) {
			t.Errorf("Size(%v, %v) = %d, %v; want %d, error %q", c.d, c.shape, got, err, c.want, c.words)
		}
	}
}

// The chunks of a grid cover each byte of each part exactly once.
func TestGrid(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	for range 500 {
		ten := Tensor{DType: DType(1 + r.IntN(NumDTypes)), Parts: uint8(1 << r.IntN(4)),
			ChunkBytes: uint32(4096 * (1 + r.IntN(3)))}
		for range r.IntN(4) {
			ten.Shape = append(ten.Shape, int64(1+r.IntN(64)))
		}
		var err error
		if ten.Bytes, err = Size(ten.DType, ten.Shape); err != nil || !ten.Splits(int(ten.Parts)) {
			continue
		}
		g := ten.Grid()
		if g.Parts*g.PartBytes != ten.Bytes || g.Parts > 1 && g.PartRow*ten.Rows() != g.PartBytes {
			t.Fatalf("%+v: the parts of grid %+v do not match the tensor's size", ten, g)
		}
		next, part := int64(0), int64(0)
		for i := range g.Chunks() {
			p, lo, hi := g.Chunk(i)
			if p != part {
				if next != g.PartBytes || p != part+1 {
					t.Fatalf("%+v: part %d ends at %d", ten, part, next)
				}
				part, next = p, 0
			}
			if lo != next || hi <= lo || hi-lo > g.ChunkBytes {
				t.Fatalf("%+v: chunk %d is part %d [%d, %d) after %d", ten, i, p, lo, hi, next)
			}
			next = hi
		}
		if next != g.PartBytes || part != g.Parts-1 {
			t.Fatalf("%+v: chunks end at part %d, %d", ten, part, next)
		}
	}
}

// Rows, RowBits and Splits are correct for odd shapes.
func TestGeometry(t *testing.T) {
	for _, c := range []struct {
		d       DType
		shape   []int64
		rows    int64
		rowBits int64
		splits  string // the numbers of parts for which Splits is true
	}{
		{F32, nil, 1, 32, "1"},
		{BF16, []int64{8}, 8, 16, "1"},
		{BF16, []int64{4, 8}, 4, 128, "1248"},
		{BF16, []int64{4, 6}, 4, 96, "12"},
		{BF16, []int64{0, 8}, 0, 0, "1"},
		{BF16, []int64{8, 0}, 8, 0, "1"},
		{BF16, []int64{2, 3, 4}, 2, 192, "124"},
		{F4, []int64{2, 3}, 2, 12, "1"},
		{F4, []int64{2, 8}, 2, 32, "124"},
		{F6E2M3, []int64{2, 8}, 2, 48, "12"},
		{U8, []int64{0, 1 << 62, 1 << 62}, 0, 0, "1"},
	} {
		ten := Tensor{DType: c.d, Shape: c.shape}
		ten.Bytes, _ = Size(c.d, c.shape)
		splits := ""
		for _, p := range []int{1, 2, 4, 8} {
			if ten.Splits(p) {
				splits += fmt.Sprint(p)
			}
		}
		if ten.Rows() != c.rows || ten.RowBits() != c.rowBits || splits != c.splits {
			t.Errorf("%v %v: %d rows of %d bits, splits %s", c.d, c.shape, ten.Rows(), ten.RowBits(), splits)
		}
		if g := ten.Grid(); g.Chunks() != 0 {
			t.Errorf("%v %v: the grid has chunks although ChunkBytes is 0", c.d, c.shape)
		}
	}
}

// container returns a small valid index: a plain file, and a container with a tensor in two parts, a plain tensor, an
// alias, and an empty tensor.
func container() *Index {
	h := [16]byte{1}
	return &Index{
		Sources: []Source{{URI: "a", Size: 108, Data: 100}, {URI: "b", Size: 8192, Data: 4096, Format: FormatOverwire}},
		Tensors: []Tensor{
			{Name: "x", Shape: []int64{4}, Bytes: 4, Off: 100, Stored: 4, Alias: -1, DType: U8, Plain: true},
			{Name: "y", Shape: []int64{1}, Bytes: 4, Off: 104, Stored: 4, Alias: -1, DType: F32, Plain: true},
			{Name: "big", Shape: []int64{64, 64}, Bytes: 8192, Off: 5120, Stored: 2048, Hash: h, ChunkBytes: 4096,
				First: 0, Count: 2,
				Source: 1, Alias: -1, DType: BF16, Parts: 2},
			{Name: "none", Shape: []int64{0, 7}, Off: 7168, First: 2, Source: 1, Alias: -1, DType: BF16, Plain: true},
			{Name: "plain", Shape: []int64{3}, Bytes: 3, Off: 7168, Stored: 3, ChunkBytes: 4096, First: 2, Count: 1,
				Source: 1, Alias: -1,
				DType: U8, Parts: 1, Plain: true},
			{Name: "x", Shape: []int64{4096}, Bytes: 8192, Off: 7171, Hash: h, First: 3, Source: 1, Alias: 2,
				DType: BF16},
		},
		Chunks: []Chunk{
			{Off: 5120, Stored: 1000, Logical: 4096, Codec: CodecX16, Transform: 1, SegTiles: 64},
			{Off: 6128, Stored: 1030, Logical: 4096, Codec: CodecX16, Transform: 1, SegTiles: 64},
			{Off: 7168, Stored: 3, Logical: 3},
		},
	}
}

// Validate accepts the valid container and rejects each fault in it with an error class and the tensor's name.
func TestValidate(t *testing.T) {
	if err := container().Validate(nil); err != nil {
		t.Fatal(err)
	}
	if err := (&Index{}).Validate(nil); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		spoil func(*Index)
		words string
	}{
		"source out of range":  {func(x *Index) { x.Tensors[0].Source = 2 }, "source 2"},
		"source negative":      {func(x *Index) { x.Tensors[0].Source = -1 }, "source -1"},
		"sources out of order": {func(x *Index) { x.Tensors[5].Source = 0 }, "out of order"},
		"data after the file":  {func(x *Index) { x.Sources[0].Data = 1000 }, "data section"},
		"name not UTF-8":       {func(x *Index) { x.Tensors[0].Name = "\xff" }, "UTF-8"},
		"name twice":           {func(x *Index) { x.Tensors[0].Name = "y" }, "two tensors"},
		"rank":                 {func(x *Index) { x.Tensors[3].Shape = make([]int64, 65) }, "rank 65"},
		"dtype":                {func(x *Index) { x.Tensors[0].DType = 23 }, "dtype"},
		"negative dimension":   {func(x *Index) { x.Tensors[0].Shape[0] = -4 }, "negative"},
		"overflow": {func(x *Index) { x.Tensors[0].Shape = []int64{1 << 62, 1 << 62} },
			"ValidationOverflow"},
		"bytes":                   {func(x *Index) { x.Tensors[0].Bytes = 5 }, "TensorInvalidInfo"},
		"hole":                    {func(x *Index) { x.Tensors[1].Off = 105 }, "InvalidOffset"},
		"overlap":                 {func(x *Index) { x.Tensors[1].Off = 103 }, "InvalidOffset"},
		"not from the start":      {func(x *Index) { x.Sources[0].Data = 96 }, "InvalidOffset"},
		"container before data":   {func(x *Index) { x.Tensors[2].Off = 100 }, "InvalidOffset"},
		"past the end":            {func(x *Index) { x.Sources[0].Size = 107 }, "after the end of the file"},
		"stored negative":         {func(x *Index) { x.Tensors[1].Stored = -4 }, "InvalidOffset"},
		"plain file, stored":      {func(x *Index) { x.Tensors[1].Stored = 3 }, "no chunks"},
		"plain file, chunks":      {func(x *Index) { x.Tensors[1].Count = 1 }, "no chunks"},
		"plain file, not plain":   {func(x *Index) { x.Tensors[1].Plain = false }, "no chunks"},
		"plain file, alias":       {func(x *Index) { x.Tensors[1].Alias = 0 }, "does not exist"},
		"first chunk negative":    {func(x *Index) { x.Tensors[3].First = -1 }, "first chunk"},
		"first chunk far":         {func(x *Index) { x.Tensors[3].First = 3 }, "first chunk"},
		"alias far":               {func(x *Index) { x.Tensors[5].Alias = 6 }, "does not exist"},
		"alias negative":          {func(x *Index) { x.Tensors[5].Alias = -2 }, "does not exist"},
		"alias of itself":         {func(x *Index) { x.Tensors[5].Alias = 5 }, "no bytes itself"},
		"alias of another file":   {func(x *Index) { x.Tensors[5].Alias = 0 }, "no bytes itself"},
		"alias of another size":   {func(x *Index) { x.Tensors[5].Alias = 4 }, "differs"},
		"alias of another dtype":  {func(x *Index) { x.Tensors[5].DType = F16 }, "differs"},
		"alias of another hash":   {func(x *Index) { x.Tensors[5].Hash[15] = 1 }, "differs"},
		"alias with bytes":        {func(x *Index) { x.Tensors[5].Stored = 5 }, "of its own"},
		"alias with chunks":       {func(x *Index) { x.Tensors[5].Count = 1 }, "of its own"},
		"alias with a grid":       {func(x *Index) { x.Tensors[5].ChunkBytes = 4096 }, "of its own"},
		"three parts":             {func(x *Index) { x.Tensors[2].Parts = 3 }, "column parts: 3"},
		"no parts":                {func(x *Index) { x.Tensors[2].Parts = 0 }, "column parts: 0"},
		"16 parts":                {func(x *Index) { x.Tensors[2].Parts = 16 }, "column parts: 16"},
		"parts that do not split": {func(x *Index) { x.Tensors[2].Shape = []int64{4096} }, "cannot be divided"},
		"chunk bytes odd":         {func(x *Index) { x.Tensors[2].ChunkBytes = 4097 }, "chunk size: 4097"},
		"chunk bytes large":       {func(x *Index) { x.Tensors[2].ChunkBytes = MaxChunkBytes + 4096 }, "chunk size"},
		"chunk bytes 0":           {func(x *Index) { x.Tensors[2].ChunkBytes = 0 }, "chunk size: 0 "},
		"plain in parts":          {func(x *Index) { x.Tensors[2].Plain = true }, "cannot be divided"},
		"plain stored":            {func(x *Index) { x.Tensors[4].Stored = 64 }, "stored size: 64 "},
		"blob not padded":         {func(x *Index) { x.Tensors[2].Stored = 2047 }, "stored size: 2047 "},
		"count":                   {func(x *Index) { x.Tensors[2].Count = 1 }, "1 chunks from number 0"},
		"first":                   {func(x *Index) { x.Tensors[2].First = 1 }, "2 chunks from number 1"},
		"too few chunks":          {func(x *Index) { x.Chunks = x.Chunks[:2] }, "1 chunks from number 2"},
		"too many chunks":         {func(x *Index) { x.Chunks = append(x.Chunks, Chunk{}) }, "belong to no tensor"},
		"chunk logical":           {func(x *Index) { x.Chunks[0].Logical = 4095 }, "4095 logical"},
		"chunk before":            {func(x *Index) { x.Chunks[0].Off = 5104 }, "outside"},
		"chunk after":             {func(x *Index) { x.Chunks[1].Off = 6144 }, "outside"},
		"chunk far":               {func(x *Index) { x.Chunks[1].Off = math.MaxInt64 }, "outside"},
		"chunks overlap":          {func(x *Index) { x.Chunks[1].Off = 6112 }, "outside"},
		"chunk empty":             {func(x *Index) { x.Chunks[0].Stored = 0 }, "0 of 4096"},
		"chunk grows": {func(x *Index) {
			x.Chunks[0].Logical, x.Chunks[0].Stored = 4096, 4097
			x.Tensors[2].Stored = 8192
		}, ""},
		"chunk misaligned": {func(x *Index) { x.Chunks[1].Off = 6121 }, "multiple of 16"},
		"segment tiles":    {func(x *Index) { x.Chunks[0].SegTiles = 257 }, "1000 of 4096"},
		"no segment tiles": {func(x *Index) { x.Chunks[0].SegTiles = 0 }, "1000 of 4096"},
		"raw but smaller": {func(x *Index) {
			x.Chunks[0].Codec, x.Chunks[0].Transform, x.Chunks[0].SegTiles = 0, 0, 0
		}, "1000 of 4096"},
		"raw with a transform": {func(x *Index) { x.Chunks[2].Transform = 1 }, "3 of 3"},
		"plain but coded": {func(x *Index) {
			x.Chunks[2] = Chunk{Off: 7168, Stored: 3, Logical: 3, Codec: CodecX16, Transform: 8, SegTiles: 1}
		}, "contiguous"},
	} {
		ix := container()
		c.spoil(ix)
		err := ix.Validate(nil)
		var at *errs.At
		if !errors.Is(err, errs.ErrFormat) || !errors.As(err, &at) || !isSaying(err, c.words) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, spoil := range map[string]func(*Index){
		"codec":     func(x *Index) { x.Chunks[0].Codec = 2 },
		"transform": func(x *Index) { x.Chunks[0].Transform = 9 },
	} {
		ix := container()
		spoil(ix)
		if err := ix.Validate(nil); !errors.Is(err, errs.ErrNotSupported) {
			t.Errorf("%s: %v", name, err)
		}
	}
	none := func(c Codec, _ uint8, d DType) bool { return c == CodecRaw || d != BF16 }
	if err := container().Validate(none); !errors.Is(err, errs.ErrNotSupported) ||
		!strings.Contains(err.Error(), `b tensor "big" chunk 0 @5120`) {
		t.Errorf("a codec that the reader does not support: %v", err)
	}
}

// Finder finds names in the requested source, even if several goroutines use it.
func TestFind(t *testing.T) {
	find := container().Finder()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if i := find(1, "big"); i != 2 {
				t.Errorf("big: found at %d, want 2", i)
			}
		})
	}
	wg.Wait()
	if a, b, c, d := find(0, "x"), find(1, "x"), find(0, "big"), find(1, "X"); a != 0 || b != 5 || c != -1 || d != -1 {
		t.Errorf("found at %d, %d, %d and %d; want 0, 5, -1 and -1", a, b, c, d)
	}
	if i := (&Index{}).Finder()(0, "x"); i != -1 {
		t.Errorf("empty index: found at %d, want -1", i)
	}
	if i := Duplicate(container().Tensors); i != -1 {
		t.Errorf("Duplicate across sources: %d", i)
	}
	many := &Index{Sources: []Source{{}}}
	for i := range 5000 {
		many.Tensors = append(many.Tensors, Tensor{Name: fmt.Sprint(i)})
	}
	find = many.Finder()
	for i := range many.Tensors {
		if got := find(0, fmt.Sprint(i)); got != i {
			t.Fatalf("tensor %d: found at %d", i, got)
		}
	}
}

// isSaying reports whether words equal an error's rule or occur in its text.
func isSaying(err error, words string) bool {
	return errs.RuleOf(err) == words || strings.Contains(err.Error(), words)
}
