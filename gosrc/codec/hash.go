package codec

// Converts hashes to the byte order of files.

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"
)

// HashOf returns an XXH3-128 in the byte order of files (docs/format.md): the high half first, each half little-endian.
func HashOf(sum xxh3.Uint128) (out [16]byte) {
	binary.LittleEndian.PutUint64(out[:], sum.Hi)
	binary.LittleEndian.PutUint64(out[8:], sum.Lo)
	return out
}
