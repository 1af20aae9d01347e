package load

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

// Several combines models with equal tensor names. The combined model reads the files that the models had open, even
// after the models are closed. A closed model is refused.
func TestSeveral(t *testing.T) {
	first, want := packed(t)
	third, _ := packed(t)
	second, more := write(t, "c", []int64{3, 5}, []int64{700, 1000})
	var models []*Model
	for _, path := range []string{first, second, first} {
		models = append(models, opened(t, Spec{URIs: []string{path}}))
	}
	want = append(append(append([][]byte{}, want...), more...), want...)
	m, err := Several(models)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{first, second} { // replace the file
		if err := errors.Join(os.WriteFile(path+".new", []byte("not one"), 0o600), os.Rename(path+".new", path)); err != nil {
			t.Fatal(err)
		}
	}
	for _, one := range models {
		one.Close()
	}
	l, _ := ended(t, m, Options{})
	for i := range want {
		mem, _, _, ok := l.Take(i)
		if !ok || !bytes.Equal(mem.Slice(), want[i]) {
			t.Errorf("tensor %d differs", i)
		}
		mem.Release()
	}
	l.Close()
	src := models[1].srcs[0]
	if err := src.ReadAt(t.Context(), make([]byte, 8), 0); err != nil {
		t.Errorf("a file of an open model is closed: %v", err)
	}
	m.Close()
	if err := src.ReadAt(t.Context(), make([]byte, 8), 0); err == nil {
		t.Error("a file is still open after all models were closed")
	}
	var at *errs.At
	if _, err := Several([]*Model{opened(t, Spec{URIs: []string{third}}),
		models[1]}); !errors.Is(err, errs.ErrArgument) || !errors.As(err, &at) || at.Source != second {
		t.Errorf("a closed model: %v", err)
	}
	settled(t)
}
