package nvcomp

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/crc32c"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/memory"
	"github.com/overwire/overwire/gosrc/tensor"
)

// far is a source with round trips.
type far struct{ source.Source }

func (f far) Facts() source.Facts { return source.Facts{Concurrency: 4} }

// storedModel returns a file with chunks of random tensors, with gaps between them and for some tensors in reverse
// order, its index, and the content of each tensor.
func storedModel(t *testing.T, dice *rand.Rand) (*tensor.Index, []byte, [][]byte) {
	const chunk = 8192
	file := make([]byte, 100)
	ix := &tensor.Index{Sources: []tensor.Source{{URI: "model.safetensors", Format: tensor.FormatOverwire}}}
	var contents [][]byte
	for range 12 {
		content := make([]byte, 1+dice.IntN(9*chunk))
		for i := range content {
			content[i] = byte(dice.Uint32())
			if i%2 == 1 && len(contents)%3 > 0 {
				content[i] = 60 + content[i]&3
			}
		}
		first, reverse := len(ix.Chunks), dice.IntN(4) == 0
		var parts [][]byte
		for at := 0; at < len(content); at += chunk {
			part := content[at:min(len(content), at+chunk)]
			c := tensor.Chunk{Logical: uint32(len(part))}
			if out, tiles, ok := new(x16.Encoder).Encode(nil, part, x16.BF16); ok {
				c.Codec, c.Transform, c.SegTiles, part = tensor.CodecX16, x16.BF16, tiles, out
			}
			c.Stored, c.Sum = uint32(len(part)), crc32c.Sum(part)
			ix.Chunks, parts = append(ix.Chunks, c), append(parts, part)
		}
		for k := range parts {
			if reverse {
				k = len(parts) - 1 - k
			}
			file = append(file, make([]byte, (16-len(file)%16)%16+16*dice.IntN(2)*dice.IntN(3))...)
			ix.Chunks[first+k].Off = int64(len(file))
			file = append(file, parts[k]...)
		}
		name := string(rune('a' + len(contents)))
		ix.Tensors = append(ix.Tensors, tensor.Tensor{Name: name, Bytes: int64(len(content)), ChunkBytes: chunk,
			First: int32(first), Count: int32(len(parts)), Alias: -1, Parts: 1, DType: tensor.BF16})
		contents = append(contents, content)
	}
	ix.Sources[0].Size = int64(len(file))
	return ix, file, contents
}

func readStream(t *testing.T, src source.Source, view *tensor.Tensor) []byte {
	t.Helper()
	p := make([]byte, view.Bytes)
	if err := src.ReadAt(t.Context(), p, view.Off); err != nil {
		t.Fatal(err)
	}
	return p
}

// Streams of stored chunks decode to the tensors, whatever ranges are read, and from any source.
func TestStreams(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	dice := rand.New(rand.NewPCG(seed, 0))
	for round := range 20 {
		ix, file, contents := storedModel(t, dice)
		alias := ix.Tensors[3]
		alias.Name, alias.Alias, alias.First, alias.Count, alias.Parts = "alias", 3, 0, 0, 0
		plain := tensor.Tensor{Name: "plain", Bytes: 9, Stored: 9, Alias: -1, Plain: true}
		parts := ix.Tensors[2]
		parts.Name, parts.Parts = "parts", 2
		ix.Tensors = append(ix.Tensors, alias, plain, parts)
		var src source.Source = memory.New("model.safetensors", file, func() {})
		if round%2 > 0 {
			src = far{src}
		}
		out, srcs, chunks := ViewStreams(ix, []source.Source{src})
		if len(out.Tensors) != 13 || len(chunks) != 13 || out.Tensors[12].Off != out.Tensors[3].Off {
			t.Fatalf("%d streams: %+v", len(out.Tensors), out.Tensors)
		}
		var all []byte
		for i := range contents {
			view := &out.Tensors[i]
			p := readStream(t, srcs[0], view)
			got, err := one(t, Spec{Op: "decode", Algorithm: "X16", Kind: Native}, p)
			if err != nil || !bytes.Equal(got, contents[i]) {
				t.Fatalf("stream %d: %v", i, err)
			}
			all = append(append(all, make([]byte, view.Off-beyond-int64(len(all)))...), p...)
		}
		for range 200 {
			from := dice.IntN(len(all))
			p := bytes.Repeat([]byte{7}, 1+dice.IntN(min(len(all)-from, 1<<dice.IntN(18))))
			if err := srcs[0].ReadAt(t.Context(), p, beyond+int64(from)); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(p, all[from:from+len(p)]) {
				t.Fatalf("bytes [%d, %d) differ from those of the whole streams", from, from+len(p))
			}
		}
	}
}

// A wrong byte of a chunk is an error that names the file, tensor, chunk and offset.
func TestStreamsOfDamagedFiles(t *testing.T) {
	dice := rand.New(rand.NewPCG(1, 2))
	for round := range 40 {
		ix, file, _ := storedModel(t, dice)
		i := dice.IntN(len(ix.Tensors))
		k := dice.IntN(int(ix.Tensors[i].Count))
		c := ix.Chunks[int(ix.Tensors[i].First)+k]
		file[c.Off+int64(dice.IntN(int(c.Stored)))] ^= 1 << dice.IntN(8)
		var src source.Source = memory.New("model.safetensors", file, func() {})
		if round%2 > 0 {
			src = far{src}
		}
		out, srcs, _ := ViewStreams(ix, []source.Source{src})
		err := srcs[0].ReadAt(context.Background(), make([]byte, out.Tensors[i].Bytes), out.Tensors[i].Off)
		var at *errs.At
		if !errors.Is(err, errs.ErrCorrupt) || !errors.As(err, &at) {
			t.Fatalf("round %d: %v", round, err)
		}
		if at.Source != "model.safetensors" || at.Tensor != ix.Tensors[i].Name || at.Chunk != int64(k) ||
			at.Offset != c.Off {
			t.Fatalf("round %d: the error is about %+v, expected tensor %d, chunk %d", round, at, i, k)
		}
	}
}
