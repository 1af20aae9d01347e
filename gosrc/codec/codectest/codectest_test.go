package codectest

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

// The suite's Decode detects every kind of faulty decoder. It accepts correct results and errors of class Corrupt.
func TestDecodeSeesFaults(t *testing.T) {
	chunk := []byte("sixteen bytes or")
	outside := func(at int) func(dst, src []byte, _ uint16) error {
		return func(dst, src []byte, _ uint16) error {
			copy(dst, src)
			beyond(dst, at) // like a faulty vector kernel
			return nil
		}
	}
	for _, c := range []struct {
		name   string
		decode func(dst, src []byte, _ uint16) error
		size   int
		want   string // expected in the error; "" if none is expected
		good   bool
	}{
		{"good", func(dst, src []byte, _ uint16) error { copy(dst, src); return nil }, 16, "", true},
		{"nothing to fill", func(_, _ []byte, _ uint16) error { return nil }, 0, "", true},
		{"refuses", func(_, _ []byte, _ uint16) error { return errs.New(errs.ErrCorrupt, "no") }, 16, "no", false},
		{"refuses in another class", func(_, _ []byte, _ uint16) error {
			return errs.New(errs.ErrArgument, "no")
		}, 16, "not of class Corrupt", false},
		{"refuses without a class", func(_, _ []byte, _ uint16) error {
			return errors.New("no")
		}, 16, "not of class Corrupt", false},
		{"writes after the end", outside(16), 16, "byte 16, outside a destination of 16 bytes, was written", false},
		{"writes far after the end", outside(16 + guard - 1), 16, "was written", false},
		{"writes before", outside(-1), 16, "byte -1, outside a destination of 16 bytes, was written", false},
		{"changes its source", func(dst, src []byte, _ uint16) error {
			copy(dst, src)
			src[3]++
			return nil
		}, 16, "changed its source", false},
		{"writes after the end and refuses", func(dst, src []byte, _ uint16) error {
			beyond(dst, 20)
			return errs.New(errs.ErrCorrupt, "no")
		}, 16, "was written", false},
	} {
		got, err := Decode(Codec{Decode: c.decode}, chunk, c.size, 0)
		switch {
		case c.want == "" && err != nil, c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		case c.good && !bytes.Equal(got, chunk[:c.size]):
			t.Errorf("%s: %q", c.name, got)
		case c.want == "no" && !errors.Is(err, errs.ErrCorrupt):
			t.Errorf("%s: %v", c.name, err)
		}
	}
	if string(chunk) != "sixteen bytes or" {
		t.Error("the caller's chunk was changed")
	}
}

// The suite passes a correct codec, even for data that the codec cannot compress. Its random choices only depend on the
// seed.
func TestRun(t *testing.T) {
	var seen [2][]string
	for i := range seen {
		c := Codec{
			// This codec stores a length, the bytes and their sum, so it detects every change that Run makes.
			Encode: func(dst, src []byte) ([]byte, uint16, bool) {
				if len(src) == 0 || src[0] == 'x' {
					return dst, 0, false
				}
				return append(append(append(dst, byte(len(src))), src...), total(src)), 7, true
			},
			Decode: func(dst, src []byte, note uint16) error {
				seen[i] = append(seen[i], fmt.Sprintf("%d %x", note, src))
				if len(src) < 2 || int(src[0]) != len(dst) || len(src) != len(dst)+2 ||
					total(src[1:len(src)-1]) != src[len(src)-1] {
					return errs.New(errs.ErrCorrupt, "no")
				}
				copy(dst, src[1:])
				return nil
			},
		}
		Run(t, c, []Sample{{"text", []byte("a few bytes")}, {"no gain", []byte("xyz")}, {"nothing", nil},
			{"one", []byte{9}}}, 77)
	}
	if len(seen[0]) < 160 || strings.Join(seen[0], "|") != strings.Join(seen[1], "|") {
		t.Errorf("got %d and %d calls, want at least 160 and the same calls", len(seen[0]), len(seen[1]))
	}
}

func total(p []byte) (n byte) {
	for _, b := range p {
		n = n*31 + b
	}
	return n
}
