package format

import (
	"context"
	"encoding/binary"
	"flag"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

var update = flag.Bool("update", false, "write the golden files of this version")

const goldens = "../../tests/goldens/container"

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// memory is a source in memory.
type memory struct {
	name  string
	b     []byte
	reads int
}

func (m *memory) URI() string         { return m.name }
func (m *memory) Facts() source.Facts { return source.Facts{} }

func (m *memory) Size() int64  { return int64(len(m.b)) }
func (m *memory) Close() error { return nil }

func (m *memory) ReadAt(_ context.Context, p []byte, off int64) error {
	m.reads++
	if off < 0 || off+int64(len(p)) > int64(len(m.b)) {
		return errs.New(errs.ErrCorrupt, "truncated")
	}
	copy(p, m.b[off:])
	return nil
}

func open(b []byte) (*tensor.Index, error) {
	ix, _, err := readIndex(context.Background(), &memory{name: "model.safetensors", b: b}, Options{})
	return ix, err
}

// bytesOf returns the bytes of item i of a golden file.
func bytesOf(i int, n int64) []byte {
	b := make([]byte, n)
	for k := range b {
		b[k] = byte(i*31 + k*7 + k>>8)
	}
	return b
}

// build writes a container with raw chunks in any layout and grid, because this package cannot import codecs.
func build(t testing.TB, metadata map[string]string, items []overwire.Item) []byte {
	t.Helper()
	l, err := overwire.NewLayout(metadata, items, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	file := make([]byte, l.Start())
	for i := range l.Tensors {
		ten := &l.Tensors[i]
		if ten.Alias >= 0 {
			continue
		}
		data := bytesOf(l.Items[i], ten.Bytes)
		ten.Hash = [16]byte{byte(l.Items[i]), 0xfe}
		g := ten.Grid()
		for k := range int64(ten.Count) {
			c := int(ten.First) + int(k)
			part, lo, hi := g.Chunk(k)
			stored := gather(data, ten, g, part)[lo:hi]
			off, err := l.Place(c, uint32(len(stored)))
			if err != nil {
				t.Fatal(err)
			}
			l.Chunks[c].Sum = crc32.Checksum(stored, castagnoli)
			file = append(append(file, make([]byte, off-int64(len(file)))...), stored...)
		}
	}
	front, size, err := l.Seal(nil)
	if err != nil {
		t.Fatal(err)
	}
	if int64(len(front)) != l.Start() {
		t.Fatalf("%d bytes before the chunks, which start at %d", len(front), l.Start())
	}
	file = append(file, make([]byte, size-int64(len(file)))...)
	copy(file, front)
	return file
}

// gather returns the bytes of one part.
func gather(data []byte, t *tensor.Tensor, g tensor.Grid, part int64) []byte {
	if g.Parts == 1 {
		return data
	}
	var out []byte
	row := g.PartRow * g.Parts
	for r := range t.Rows() {
		at := r*row + part*g.PartRow
		out = append(out, data[at:at+g.PartRow]...)
	}
	return out
}

// golden returns one container of every kind for this version, by file name.
func golden(t testing.TB) map[string][]byte {
	var dtypes []overwire.Item
	for d := tensor.DType(1); int(d) <= tensor.NumDTypes; d++ {
		dtypes = append(dtypes, overwire.Item{Name: "t." + d.String(), DType: d, Shape: []int64{3, 4}, Plain: true,
			ChunkBytes: 4096})
	}
	return map[string][]byte{
		"empty":  build(t, nil, nil),
		"dtypes": build(t, map[string]string{"format": "pt"}, dtypes),
		"kinds": build(t, map[string]string{"läufer": "a\n\"b\"", "empty": ""}, []overwire.Item{
			{Name: "whole", DType: tensor.U8, Shape: []int64{9000}, ChunkBytes: 4096},
			{Name: "two", DType: tensor.BF16, Shape: []int64{4, 8}, Parts: 2, ChunkBytes: 4096},
			{Name: "eight", DType: tensor.F32, Shape: []int64{2, 3, 8}, Parts: 8, ChunkBytes: 8192},
			{Name: "nibbles", DType: tensor.F4, Shape: []int64{3, 2, 5}, ChunkBytes: 1 << 20},
			{Name: "scalar", DType: tensor.F64, Plain: true, ChunkBytes: 4096},
			{Name: "long", DType: tensor.I64, Shape: []int64{8, 66}, Plain: true, ChunkBytes: 4096},
			{Name: "odd", DType: tensor.U8, Shape: []int64{7}, Plain: true, ChunkBytes: 4096},
			{Name: "nothing", DType: tensor.BF16, Shape: []int64{0, 4}},
			{Name: "none", DType: tensor.C64, Shape: []int64{2, 0}, Plain: true},
			{Name: "tied", DType: tensor.BF16, Shape: []int64{32}, Alias: 2},
			{Name: "a tie of bytes", DType: tensor.U8, Shape: []int64{7}, Alias: 7},
		}),
		"zeros": build(t, nil, []overwire.Item{
			{Name: "z", DType: tensor.F32, Shape: []int64{0}},
			{Name: "b", DType: tensor.U8, Shape: []int64{64}, Plain: true, ChunkBytes: 4096},
			{Name: "c", DType: tensor.F32, Shape: []int64{0}},
			{Name: "a", DType: tensor.U8, Shape: []int64{64}, Alias: 2},
			{Name: "", DType: tensor.U8, Shape: []int64{5, 0}},
		}),
	}
}

// goldenPath returns the path of a golden file for the current writer. The folders overwire-1.0 and overwire-1.0-note
// have files of earlier writers.
func goldenPath(name string) string {
	return filepath.Join(goldens, "overwire-1.4", name+".safetensors")
}

// The writer reproduces the golden files byte for byte.
func TestGoldens(t *testing.T) {
	for name, b := range golden(t) {
		if *update {
			if err := os.MkdirAll(filepath.Dir(goldenPath(name)), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(goldenPath(name), b, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		old, err := os.ReadFile(goldenPath(name))
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(old, b) {
			t.Errorf("%s: the writer's bytes have changed: a new minor needs its own folder", name)
		}
	}
}

// Files of every released writer can be opened, and the chunks of containers match their checksums.
func TestGoldensRead(t *testing.T) {
	paths, err := filepath.Glob(filepath.Join(goldens, "*", "*.safetensors"))
	if err != nil || len(paths) < 4 {
		t.Fatal(paths, err)
	}
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		ix, err := open(b)
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		if !ix.Sources[0].Overwire() {
			continue
		}
		for i := range ix.Tensors {
			ten := &ix.Tensors[i]
			for c := ten.First; c < ten.First+ten.Count; c++ {
				ch := ix.Chunks[c]
				if crc32.Checksum(b[ch.Off:ch.Off+int64(ch.Stored)], castagnoli) != ch.Sum {
					t.Errorf("%s: %s chunk %d does not match its checksum", path, ten.Name, c)
				}
			}
			if ten.Plain && ten.Off%int64(ten.DType.Align()) != 0 {
				t.Errorf("%s: %s at %d is not aligned", path, ten.Name, ten.Off)
			}
		}
	}
}

// TestKinds checks that the container "kinds" reads back exactly as it was written.
func TestKinds(t *testing.T) {
	b := golden(t)["kinds"]
	ix, err := open(b)
	if err != nil {
		t.Fatal(err)
	}
	src := ix.Sources[0]
	if !src.Overwire() || src.Size != int64(len(b)) || src.Data != 4096 || len(src.Metadata) != 2 ||
		src.Metadata["läufer"] != "a\n\"b\"" {
		t.Errorf("wrong source: %+v", src)
	}
	var got []string
	for i := range ix.Tensors {
		got = append(got, ix.Tensors[i].Name)
	}
	// Compressed tensors come first. Plain tensors follow, those with a multiple of 64 bytes first, and the others by
	// alignment. Aliases are last.
	want := []string{"eight", "nibbles", "two", "whole", "long", "none", "nothing", "scalar", "odd", "a tie of bytes",
		"tied"}
	if !slices.Equal(got, want) {
		t.Errorf("got the order %q, want %q", got, want)
	}
	two, tied := &ix.Tensors[2], &ix.Tensors[10]
	if two.Parts != 2 || two.Count != 2 || two.Plain || two.Stored != 64 || tied.Alias != 2 ||
		tied.Bytes != two.Bytes || tied.Count != 0 {
		t.Errorf("wrong tensors: two %+v\ntied %+v", two, tied)
	}
	data := bytesOf(1, two.Bytes) // item 1 is "two": part 1 holds columns 4..7 of each row
	second := ix.Chunks[two.First+1]
	var columns []byte
	for r := range 4 {
		columns = append(columns, data[16*r+8:16*r+16]...)
	}
	if !slices.Equal(b[second.Off:second.Off+int64(second.Stored)], columns) {
		t.Error("part 1 does not hold the right columns")
	}
	// Other readers see the same file as plain safetensors.
	h, err := safetensors.Parse("x", b[:4096], int64(len(b)), safetensors.Options{})
	if err != nil || h.Tensors[0].Name != overwire.IndexName || h.Metadata[overwire.MetadataKey] == "" {
		t.Errorf("read as a safetensors file: %v", err)
	}
}

// restamp corrects the checksums of a container, so that tests reach the checks after them. It changes nothing else.
func restamp(b []byte) []byte {
	if len(b) < 8 {
		return b
	}
	n := binary.LittleEndian.Uint64(b)
	if n > uint64(len(b)-8) || uint64(len(b))-8-n < 72 {
		return b
	}
	b = slices.Clone(b)
	head, blob := b[:8+n], b[8+n:]
	counts := func(at int) uint64 { return uint64(binary.LittleEndian.Uint32(blob[at:])) }
	end := 64 + 8*counts(24) + 64*counts(16) + 32*counts(20)
	if end > uint64(len(blob)-8) {
		return b
	}
	binary.LittleEndian.PutUint32(blob[40:], crc32.Checksum(head, castagnoli))
	binary.LittleEndian.PutUint32(blob[end:], crc32.Checksum(blob[:end], castagnoli))
	return b
}
