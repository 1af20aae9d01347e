package bitstream

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
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
