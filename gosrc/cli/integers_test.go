package cli

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// extremes are the numbers at which sums, products and conversions wrap around.
var extremes = []uint64{0, 1, 1 << 31, 1 << 32, 1<<63 - 64, 1 << 63, 1<<64 - 1}

var le = binary.LittleEndian

// fields sets the 4-byte and the 8-byte integer at every step-th offset of b[lo:hi] to each extreme that fits, and
// yields each changed copy. This covers every integer of a header.
func fields(b []byte, lo, hi, step int, yield func(what string, changed []byte)) {
	for at := lo; at < hi; at += step {
		for _, width := range []int{4, 8} {
			if at+width > hi {
				continue
			}
			for _, v := range extremes {
				if width < 8 && v >= 1<<(8*width) {
					v = 1<<(8*width) - 1 // the largest value of this width
				}
				changed := append([]byte(nil), b...)
				for k := range width {
					changed[at+k] = byte(v >> (8 * k))
				}
				yield(fmt.Sprintf("%d bytes at %d = %d", width, at, v), changed)
			}
		}
	}
}

// pairs sets the 8-byte integers at two offsets to each pair of extremes. The product of a pair can overflow even if
// neither number is too large.
func pairs(b []byte, first, second int, yield func(what string, changed []byte)) {
	for _, v := range extremes {
		for _, w := range extremes {
			changed := append([]byte(nil), b...)
			le.PutUint64(changed[first:], v)
			le.PutUint64(changed[second:], w)
			yield(fmt.Sprintf("at %d and %d: %d and %d", first, second, v, w), changed)
		}
	}
}

// numbers sets each number of a JSON header, and the header's own length, to each of the extremes.
func numbers(b []byte, yield func(what string, changed []byte)) {
	n := le.Uint64(b)
	header, data := string(b[8:8+n]), b[8+n:]
	for _, at := range regexp.MustCompile(`\d+`).FindAllStringIndex(header, -1) {
		for _, v := range extremes {
			text := header[:at[0]] + strconv.FormatUint(v, 10) + strings.TrimRight(header[at[1]:], " ")
			text += strings.Repeat(" ", (8-len(text)%8)%8)
			yield(fmt.Sprintf("the number at %d = %d", at[0], v),
				append(append(le.AppendUint64(nil, uint64(len(text))), text...), data...))
		}
	}
	for _, v := range extremes {
		yield(fmt.Sprintf("header of %d bytes", v), append(le.AppendUint64(nil, v), b[8:]...))
	}
}

// container sets each field of a compressed file's index and of one chunk's header to each extreme. It recomputes every
// checksum, so only the field itself can cause an error.
func container(b []byte, yield func(what string, changed []byte)) {
	castagnoli := crc32.MakeTable(crc32.Castagnoli)
	data := 8 + int(le.Uint64(b))
	counts := func(at int) int { return int(le.Uint32(b[data+at:])) }
	dims, tensors, chunks := counts(24), counts(16), counts(20)
	records := data + 64 + 8*dims
	chunkAt := records + 64*tensors
	end := chunkAt + 32*chunks
	sealed := func(what string, changed []byte) {
		le.PutUint32(changed[end:], crc32.Checksum(changed[data:end], castagnoli))
		yield("index: "+what, changed)
	}
	fields(b, data+4, data+40, 4, sealed)
	fields(b, data+64, min(end, data+64+8*dims+2*64), 4, sealed)
	fields(b, chunkAt, min(end, chunkAt+2*32), 2, sealed)
	// The first coded chunk: its header, directory and first words.
	for c := range chunks {
		record := chunkAt + 32*c
		if b[record+20] == 0 {
			continue
		}
		at, stored := int(le.Uint64(b[record:])), int(le.Uint32(b[record+8:]))
		fields(b, at, at+min(stored, 160), 4, func(what string, changed []byte) {
			le.PutUint32(changed[record+16:], crc32.Checksum(changed[at:at+stored], castagnoli))
			le.PutUint32(changed[end:], crc32.Checksum(changed[data:end], castagnoli))
			yield("chunk: "+what, changed)
		})
		return
	}
	panic("no chunk is coded")
}

// small returns a plain file with one tensor that compresses and one that does not.
func small() []byte {
	header := `{"norm":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"weight":{"dtype":"BF16","shape":[64,32],"data_offsets":[12,4108]}}`
	header += strings.Repeat(" ", (8-len(header)%8)%8)
	b := append(append(le.AppendUint64(nil, uint64(len(header))), header...), make([]byte, 12)...)
	r := rand.New(rand.NewPCG(7, 7))
	for range 64 * 32 {
		b = le.AppendUint16(b, uint16(math.Float32bits(float32(r.NormFloat64()))>>16))
	}
	return b
}

// Any integer in a file's header causes at most a typed error. No command reports an internal bug, and the engine still
// works afterwards.
func TestIntegers(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	key := path("key")
	if err := os.WriteFile(key, []byte(strings.Repeat("a5", 32)), 0o600); err != nil {
		t.Fatal(err)
	}
	plain := path("plain.safetensors")
	if err := os.WriteFile(plain, small(), 0o600); err != nil {
		t.Fatal(err)
	}
	convert := func(out string, options ...string) []byte {
		must(t, append([]string{"convert", plain, "-o", path(out)}, options...)...)
		b, err := os.ReadFile(path(out))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	read := func(name string) []byte {
		b, err := os.ReadFile(path(name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	index := func(b []byte) int { return 73 + int(le.Uint64(b[65:])) }
	seen := map[int]int{}
	for _, c := range []struct {
		kind    string
		file    []byte
		mutate  func(b []byte, yield func(what string, changed []byte))
		options []string
	}{
		{"safetensors", read("plain.safetensors"), numbers, nil},
		{"overwire", convert("x.ow.safetensors", "--to", "overwire"), func(b []byte, yield func(string, []byte)) {
			numbers(b, yield)
			container(b, yield)
		}, nil},
		{"tensors", convert("x.tensors"), func(b []byte, yield func(string, []byte)) {
			fields(b, 5, 73, 4, yield)
			fields(b, 73, min(index(b), 73+200), 1, yield)
			record := int(le.Uint64(b[index(b)-24:]))
			fields(b, record, min(record+120, len(b)), 1, yield)
			pairs(b, 57, 65, yield)
			pairs(b, index(b)-16, index(b)-8, yield)
		}, nil},
		{"encrypted tensors", convert("y.tensors", "--encrypt-key", "file:"+key),
			func(b []byte, yield func(string, []byte)) {
				fields(b, 73, min(index(b), 73+120), 1, yield)
				// The bytes around the boxes of each of two records.
				for _, at := range []int{index(b), int(le.Uint64(b[index(b)-24:]))} {
					fields(b, at, min(at+200, len(b)), 1, yield)
				}
				// The size of a box and, after the nonce, the number of boxes.
				for at := 0; ; at += 8 {
					k := bytes.Index(b[at:], le.AppendUint64(nil, 2<<20))
					if k < 0 {
						break
					}
					at += k
					pairs(b, at, at+8+24, yield)
				}
			}, []string{"--decrypt-key", "file:" + key}},
	} {
		t.Run(c.kind, func(t *testing.T) {
			ends := map[int]int{}
			target := path("changed" + filepath.Ext(strings.ReplaceAll(c.kind, "tensors", "x.tensors")))
			n := 0
			c.mutate(c.file, func(what string, changed []byte) {
				_ = os.Remove(target) // rewriting a truncated file would wait for the disk
				if err := os.WriteFile(target, changed, 0o600); err != nil {
					t.Fatal(err)
				}
				verbs := [][]string{{"verify", target}}
				if n++; n%23 == 0 {
					verbs = append(verbs, []string{"load", target}, []string{"inspect", target},
						[]string{"convert", target, "-f", "-o", path("out.safetensors")})
				}
				for _, argv := range verbs {
					if argv[0] != "inspect" {
						argv = append(argv, c.options...)
					}
					status, _, stderr := overwire(argv...)
					if ends[status]++; status == ExitEngine || status == ExitUsage || spawn.Poisoned() != nil {
						t.Fatalf("%s: %q: status %d: %s", what, argv, status, stderr)
					}
				}
			})
			t.Logf("%d files, by status: %v", n, ends)
			for status, k := range ends {
				seen[status] += k
			}
		})
	}
	if seen[ExitBad] == 0 || seen[ExitOK] == 0 {
		t.Error("every file was accepted, or every file was refused")
	}
	must(t, "verify", plain)
}
