package format

import (
	"bytes"
	"encoding/binary"
	"errors"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

// sizeOf returns the length of a file, how many bytes it needs to determine it, or an error for a different format.
func TestSizeOf(t *testing.T) {
	header := `{"a":{"dtype":"U8","shape":[3],"data_offsets":[5,8]},"b":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}}` + strings.Repeat(" ", 1000)
	file := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...)
	data := int64(len(file))
	file = append(file, make([]byte, 50)...)
	for n := range len(file) + 1 {
		size, need, err := sizeOf("x", file[:n])
		switch {
		case err != nil:
			t.Fatal(n, err)
		case n < first && need != first, n >= first && int64(n) < data && need != data:
			t.Fatalf("with %d bytes: sizeOf needs %d", n, need)
		case int64(n) >= data && (size != data+8 || need != 0):
			t.Fatalf("with %d bytes: got the size %d", n, size)
		}
	}
	if size, need, err := sizeOf("x", append([]byte("|TZR|"), make([]byte, 1000)...)); size != -1 || need != 0 ||
		err != nil {
		t.Error(size, need, err)
	}
	for _, junk := range [][]byte{bytes.Repeat([]byte{0xff}, 600), bytes.Repeat([]byte("<html>"), 100),
		append([]byte{9, 0, 0, 0, 0, 0, 0, 0}, bytes.Repeat([]byte("["), 600)...)} {
		if _, _, err := sizeOf("x", junk); !errors.Is(err, errs.ErrFormat) {
			t.Errorf("%.9q: %v", junk, err)
		}
	}
}
