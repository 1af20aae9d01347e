package memory

import (
	"bytes"
	"testing"

	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

func TestSuite(t *testing.T) {
	sourcetest.Suite(t, sourcetest.Is{Resident: true}, func(_ *testing.T, data []byte) source.Source {
		return New("mem", data, func() {})
	})
}

// A view shares memory with the source and cannot grow beyond its end. Close frees the bytes once; later views
// fail.
func TestView(t *testing.T) {
	data := []byte("0123456789")
	freed := 0
	m := New("mem", data, func() { freed++ })
	b, err := m.Facts().View(2, 3)
	if err != nil || !bytes.Equal(b, []byte("234")) || &b[0] != &data[2] || cap(b) != 3 {
		t.Errorf("%q of capacity %d, %v", b, cap(b), err)
	}
	for _, c := range [][2]int64{{-1, 2}, {9, 2}, {11, 0}, {0, -1}, {1 << 62, 1 << 62}} {
		if b, err := m.Facts().View(c[0], c[1]); err == nil {
			t.Errorf("%v gives %q", c, b)
		}
	}
	for range 2 {
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := m.Facts().View(0, 1); err == nil || freed != 1 {
		t.Errorf("after Close: %v, freed %d times", err, freed)
	}
}
