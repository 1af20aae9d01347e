package x16

import (
	"bytes"
	"hash/crc32"
	"testing"
)

// oddSizes are logical sizes around a tile, a vector, a group of segments, and the longest segment of each transform.
var oddSizes = []int{255, 257, 512, 1023, 1030, 4097, 16387, 65537, 131077, 262147}

// odd returns reproducible data from a 64-bit congruential generator. Most of its symbols have one of a few values; the
// other bits are arbitrary.
func odd(transform uint8, n int) []byte {
	f := page[transform]
	out := make([]byte, n)
	x := uint64(transform)*1_000_003 + uint64(n)
	next := func() uint64 {
		x = x*6364136223846793005 + 1442695040888963407
		return x >> 33
	}
	for i := range out {
		out[i] = byte(next() >> 7)
	}
	for i := range n * 8 / f.width {
		v := next() % 7 * (next() % 5) % (1 << len(f.value))
		if next()%997 == 0 {
			v = next() % (1 << len(f.value)) // escapes, if the transform has them
		}
		f.put(out, i, f.element(out, i)&^place(1<<len(f.value)-1, f.value)|place(uint32(v), f.value))
	}
	return out
}

// oddGoldens lists the chunks of odd as version 0.1.0 writes them: bytes, tiles per segment, and CRC-32C. An entry is
// empty if the data is not compressed.
var oddGoldens = map[uint8][10][3]uint32{
	BF16: {
		{},                        // of 255
		{},                        // of 257
		{},                        // of 512
		{},                        // of 1023
		{982, 2, 0xa7d41ad4},      // of 1030
		{3281, 8, 0x2d529095},     // of 4097
		{12611, 32, 0xf161df73},   // of 16387
		{50241, 32, 0x5544f4fd},   // of 65537
		{99941, 64, 0xa8e615c7},   // of 131077
		{199923, 128, 0x6f20c646}, // of 262147
	},
	FP16: {
		{},                        // of 255
		{},                        // of 257
		{},                        // of 512
		{},                        // of 1023
		{},                        // of 1030
		{},                        // of 4097
		{15635, 32, 0x5f728c74},   // of 16387
		{62481, 32, 0x85a18d9c},   // of 65537
		{124549, 64, 0x9914d615},  // of 131077
		{248803, 128, 0xc890ea60}, // of 262147
	},
	FP32: {
		{},                       // of 255
		{},                       // of 257
		{},                       // of 512
		{},                       // of 1023
		{},                       // of 1030
		{3793, 4, 0x4e0a84f0},    // of 4097
		{14611, 16, 0x97b79c93},  // of 16387
		{57969, 32, 0x163f4a7},   // of 65537
		{115813, 32, 0xbc74dd9f}, // of 131077
		{230931, 64, 0xf139646a}, // of 262147
	},
	E4M3: {
		{},                        // of 255
		{},                        // of 257
		{},                        // of 512
		{},                        // of 1023
		{},                        // of 1030
		{3841, 16, 0xeb6c6948},    // of 4097
		{14883, 32, 0x783a2581},   // of 16387
		{58529, 64, 0x1a9c6fba},   // of 65537
		{116853, 128, 0x21340050}, // of 131077
		{233107, 256, 0x6c76ae7d}, // of 262147
	},
	E5M2: {
		{},                        // of 255
		{},                        // of 257
		{},                        // of 512
		{},                        // of 1023
		{},                        // of 1030
		{3857, 16, 0xed191373},    // of 4097
		{14819, 32, 0x9877d01b},   // of 16387
		{58945, 64, 0x729e1513},   // of 65537
		{117429, 128, 0x567e9c96}, // of 131077
		{235203, 256, 0x78fe2e45}, // of 262147
	},
	Int8: {
		{},                        // of 255
		{},                        // of 257
		{},                        // of 512
		{},                        // of 1023
		{},                        // of 1030
		{3825, 16, 0x9b12fb73},    // of 4097
		{14819, 32, 0xa3aa44f9},   // of 16387
		{58705, 64, 0x8142ca3b},   // of 65537
		{116885, 128, 0x924d543d}, // of 131077
		{232931, 256, 0x4a6ac3c},  // of 262147
	},
	Nibbles: {
		{},                        // of 255
		{},                        // of 257
		{},                        // of 512
		{},                        // of 1023
		{1014, 8, 0x3c7b8312},     // of 1030
		{3361, 32, 0xfbc4e203},    // of 4097
		{13155, 32, 0x2539ee69},   // of 16387
		{51217, 128, 0xff4e7088},  // of 65537
		{102117, 256, 0xf35ecdd8}, // of 131077
		{203795, 256, 0x963e3171}, // of 262147
	},
	Bytes: {
		{},                        // of 255
		{},                        // of 257
		{464, 2, 0x45d8842b},      // of 512
		{847, 3, 0x5b37d754},      // of 1023
		{742, 4, 0x4d61813c},      // of 1030
		{2337, 16, 0xa91b25b4},    // of 4097
		{8803, 32, 0xb87a7e2f},    // of 16387
		{34705, 64, 0xef476d7b},   // of 65537
		{68773, 128, 0xee2d802d},  // of 131077
		{136675, 256, 0x80749ba2}, // of 262147
	},
}

// At every level the encoder still writes the same chunks, and they can be decoded. If the encoder's choices change,
// this test must be updated deliberately.
func TestOddGoldens(t *testing.T) {
	table := crc32.MakeTable(crc32.Castagnoli)
	for tr := uint8(BF16); tr <= Bytes; tr++ {
		for i, n := range oddSizes {
			src := odd(tr, n)
			for _, l := range Levels() {
				e := Encoder{level: l, forced: true}
				chunk, st, ok := e.Encode(nil, src, tr)
				got := [3]uint32{uint32(len(chunk)), uint32(st), crc32.Checksum(chunk, table)}
				if !ok {
					got = [3]uint32{}
				}
				if got != oddGoldens[tr][i] {
					t.Errorf("%v, %s, %d bytes: {%d, %d, %#x}", l, Name(tr), n, got[0], got[1], got[2])
				}
				if !ok {
					continue
				}
				dst := make([]byte, n)
				if err := DecodeAt(l, dst, chunk, tr, st); err != nil || !bytes.Equal(dst, src) {
					t.Errorf("%v, %s, %d bytes: %v", l, Name(tr), n, err)
				}
			}
		}
	}
}
