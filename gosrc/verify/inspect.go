package verify

// This file describes files by their headers.

import (
	"context"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
)

// Inspect describes files by their headers and indexes. It reads no tensor bytes.
func Inspect(ctx context.Context, uris []string, access format.Access) (*Inspection, error) {
	m, others, err := openOrList(ctx, uris, access, false)
	if err != nil {
		return nil, errs.Ended(ctx, err)
	}
	out := &Inspection{}
	if m != nil {
		defer m.Close()
		out.addModel(m)
	}
	out.Sources = append(out.Sources, others...)
	out.sumUp()
	return out, nil
}
