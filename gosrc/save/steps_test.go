package save

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/save/publish"
	"github.com/overwire/overwire/gosrc/tensor"
)

// endingBody is one of two bodies that are read at the same time. The first fails when both are being read. The second
// waits until its context ends and stores the cause in why.
type endingBody struct {
	began chan struct{}
	why   *error
}

func (e endingBody) bytes(ctx context.Context, _ []byte, _ int64) ([]byte, error) {
	if e.why == nil {
		<-e.began
		return nil, errs.New(errs.ErrIO, "no")
	}
	close(e.began)
	<-ctx.Done()
	*e.why = context.Cause(ctx)
	return nil, *e.why
}

func TestStepsEndByTheFirstError(t *testing.T) {
	// When a tensor cannot be read, everything else in progress ends with that error.
	dir, began := t.TempDir(), make(chan struct{})
	var why error
	items := make([]*Item, 2)
	for i, body := range []body{endingBody{began: began}, endingBody{began: began, why: &why}} {
		items[i] = &Item{name: fmt.Sprint(i), dtype: tensor.U8, shape: []int64{batchBytes}, bytes: batchBytes,
			body: body, parts: 1}
	}
	spec := Spec{Path: filepath.Join(dir, "x.safetensors"), Threads: 2}
	to, err := Resolve(spec.Path, &spec)
	if err != nil {
		t.Fatal(err)
	}
	_, err = NewWriter(to, &spec, nil).Write(t.Context(), []File{{File: publish.File{Path: spec.Path}, Items: items}})
	if !errors.Is(err, errs.ErrIO) || !errors.Is(why, errs.ErrIO) {
		t.Errorf("the save ended with %v, its other step with %v", err, why)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}
