package bitstream

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"os"
	"strconv"
	"strings"
	"testing"
)

// Streams that nvCOMP 6.0 wrote on an H200: the length of the content in 16
// bytes, LZ4 blocks with bits left over in their last token, blocks of Cascaded
// that it could not make smaller.
func TestStreamsOfVersionSix(t *testing.T) {
	const size1, size7 = "01000000000000000000000000000000", "07000000000000000000000000000000"
	for _, c := range []struct {
		algorithm    string
		kind         Kind
		stream, want string
	}{
		{"LZ4", Raw, "1c1a", "1a"},
		{"LZ4", Raw, "7c1ac8c215e7292f", "1ac8c215e7292f"},
		{"LZ4", WithSize, size1 + "1c1a", "1a"},
		{"LZ4", WithSize, size7 + "7c1ac8c215e7292f", "1ac8c215e7292f"},
		{"LZ4", WithSize, "0000000000000000000000000000000000", ""},
		{"Snappy", WithSize, size1 + "01001a", "1a"},
		{"Snappy", WithSize, size7 + "07181ac8c215e7292f", "1ac8c215e7292f"},
		{"Snappy", WithSize, "0000000000000000000000000000000000", ""},
		{"Zstd", WithSize, size1 + "28b52ffd20010900001a", "1a"},
		{"Zstd", WithSize, size7 + "28b52ffd20073900001ac8c215e7292f", "1ac8c215e7292f"},
		{"Zstd", WithSize, "0000000000000000000000000000000028b52ffd2000010000", ""},
		{"Cascaded", Raw, "00000085040000001ac8c215", "1ac8c215"},
	} {
		stream, _ := hex.DecodeString(c.stream)
		want, _ := hex.DecodeString(c.want)
		got, err := one(t, Spec{Op: OpDecode, Algorithm: c.algorithm, Kind: c.kind}, stream)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s, kind %d, %s: %x, %v", c.algorithm, c.kind, c.stream, got, err)
		}
	}
}

// What is written sized is told apart when it is read: by the version it was
// written for, the length stands in 4, 8 or 16 bytes, with zeros behind it.
func TestSizedStreamsOfOurOwn(t *testing.T) {
	for _, a := range algorithms {
		if a.decode == nil {
			continue
		}
		for version, want := range map[int]int{0: 16, 5: 8, 6: 16} {
			switch {
			case a.id == X16:
				want = 8
			case a.id == LZ4 && version == 5:
				want = 4
			}
			for _, src := range [][]byte{nil, {0}, make([]byte, 16), make([]byte, 70_000), text(40, 1), text(70_000, 2)} {
				if a.id == Cascaded {
					src = src[:len(src)&^3]
				}
				made, err := one(t, Spec{Op: OpEncode, Algorithm: a.name, Kind: WithSize, Version: version}, src)
				if err != nil {
					t.Fatal(err)
				}
				if k := a.prefixOf(made); k != want {
					t.Errorf("%s of %d bytes, version %d: %d bytes before the block, want %d", a.name, len(src), version, k, want)
					continue
				}
				length := binary.LittleEndian.AppendUint64(nil, uint64(len(src)))
				length = append(length, make([]byte, 8)...)
				if !bytes.Equal(made[:want], length[:want]) {
					t.Errorf("%s of %d bytes, version %d: % x", a.name, len(src), version, made[:want])
				}
				raw, _ := one(t, Spec{Op: OpEncode, Algorithm: a.name, Kind: Raw, Version: version}, src)
				if !bytes.Equal(made[want:], raw) {
					t.Errorf("%s of %d bytes, version %d: another block than the raw one", a.name, len(src), version)
				}
				got, err := one(t, Spec{Op: OpDecode, Algorithm: a.name, Kind: WithSize}, made)
				if err != nil || !bytes.Equal(got, src) {
					t.Errorf("%s of %d bytes, version %d: %v", a.name, len(src), version, err)
				}
			}
		}
	}
}

// A written is a stream that nvCOMP wrote.
type written struct {
	Algorithm string `json:"algorithm"`
	Kind      Kind   `json:"kind"`
	DType     string `json:"dtype"`
	Sums      bool   `json:"sums"`
	Plain     string `json:"plain"`
	Stream    []byte `json:"stream"`
}

func (w *written) plain(t testing.TB) []byte {
	if n, ok := strings.CutPrefix(w.Plain, "zeros:"); ok {
		size, err := strconv.Atoi(n)
		if err != nil {
			t.Fatal(err)
		}
		return make([]byte, size)
	}
	if w.Plain == "ramp" {
		ramp := make([]byte, 24000)
		for i := range 3000 {
			binary.LittleEndian.PutUint64(ramp[8*i:], uint64(i/5*3))
		}
		return ramp
	}
	p, err := base64.StdEncoding.DecodeString(w.Plain)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// ofSix reads streams that nvCOMP 6.0.0 wrote on an H200, of words, zeros and
// numbers that were made for it.
func ofSix(t testing.TB) (list []written) {
	file, err := os.Open("testdata/nvcomp-6.0.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	lines, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	for d := json.NewDecoder(lines); ; {
		var w written
		if err := d.Decode(&w); errors.Is(err, io.EOF) {
			return list
		} else if err != nil {
			t.Fatal(err)
		}
		list = append(list, w)
	}
}

// What nvCOMP 6 wrote is read, its checksums agree where it computed any, and no
// byte of a stream with them changes unseen.
func TestSixIsRead(t *testing.T) {
	seen := map[string]int{}
	for i, w := range ofSix(t) {
		want := w.plain(t)
		s := Spec{Op: OpDecode, Algorithm: w.Algorithm, Kind: w.Kind}
		if w.Sums {
			s.Verify = VerifyAlways
		}
		got, err := one(t, s, w.Stream)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%d: %s, kind %d, %s, %d bytes: %d back, %v", i, w.Algorithm, w.Kind, w.DType, len(want), len(got), err)
		}
		seen[w.Algorithm]++
		if !w.Sums || len(w.Stream) > 300 || len(want) > 1000 {
			continue
		}
		for at := range w.Stream {
			bad := bytes.Clone(w.Stream)
			bad[at] ^= 0x10
			if got, err := one(t, s, bad); err == nil && at != 53 && at != 54 {
				t.Errorf("%d: %s: byte %d changed unseen: %d bytes", i, w.Algorithm, at, len(got))
			}
		}
	}
	for _, name := range []string{"LZ4", "Snappy", "Deflate", "Gzip", "GDeflate", "Cascaded"} {
		if seen[name] < 10 {
			t.Errorf("%s: %d streams", name, seen[name])
		}
	}
}

// Where the encoder has no choice, what is written is what nvCOMP 6 writes: its
// Cascaded to the byte but for those between arrays, which it leaves as they
// were; the header, tables and checksums around it.
func TestSixIsWritten(t *testing.T) {
	same := 0
	for i, w := range ofSix(t) {
		if w.Algorithm != "Cascaded" || len(w.Stream) < 17 {
			continue
		}
		plain := w.plain(t)
		s := Spec{Op: OpEncode, Algorithm: w.Algorithm, Kind: w.Kind, DType: w.DType, Sums: w.Sums}
		if w.DType == "" {
			s.DType = "U32"
		}
		made, err := one(t, s, plain)
		if err != nil {
			t.Fatal(err)
		}
		if w.Kind == Native && w.Sums {
			continue // of a payload with other bytes between arrays there are other sums
		}
		if want := w.Stream; w.Kind == Native && len(made) == (len(want)+7)&^7 {
			made = made[:len(want)] // nvCOMP does not fill up the last chunk
			copy(made[8:16], want[8:16])
		}
		if len(made) != len(w.Stream) {
			t.Errorf("%d: %s of %d bytes: %d bytes, nvCOMP %d", i, w.DType, len(plain), len(made), len(w.Stream))
			continue
		}
		other := 0
		for at := range made {
			if made[at] != w.Stream[at] && made[at] != 0 {
				other++
			}
		}
		if other > 0 {
			t.Errorf("%d: kind %d, %s of %d bytes: %d bytes are others:\n% x\n% x", i, w.Kind, w.DType, len(plain), other, made[:min(len(made), 200)], w.Stream[:min(len(made), 200)])
		}
		if bytes.Equal(made, w.Stream) {
			same++
		}
	}
	if same < 20 {
		t.Errorf("%d streams of Cascaded are the very ones of nvCOMP", same)
	}
}
