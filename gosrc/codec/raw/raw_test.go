package raw_test

import (
	"testing"

	"github.com/overwire/overwire/gosrc/codec/codectest"
	"github.com/overwire/overwire/gosrc/codec/raw"
)

// The raw codec passes the suite, trivial as it is.
func TestSuite(t *testing.T) {
	c := codectest.Codec{
		Encode: func(dst, src []byte) ([]byte, uint16, bool) { return raw.Encode(dst, src), 0, true },
		Decode: func(dst, src []byte, _ uint16) error { return raw.Decode(dst, src) },
	}
	codectest.Run(t, c, []codectest.Sample{
		{Name: "one byte", Data: []byte{7}},
		{Name: "text", Data: []byte("some bytes of a tensor")},
	}, 1)
	if err := raw.Decode(nil, nil); err != nil {
		t.Error("an empty chunk:", err)
	}
}
