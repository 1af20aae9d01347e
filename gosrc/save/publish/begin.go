package publish

// This file begins a publication.

import (
	"context"

	"github.com/overwire/overwire/gosrc/source"
)

// Begin checks that files can be published, chooses the names of shards, and returns the destination for the files. The
// last file is the one that readers look for. The caller must call Drop.
func Begin(ctx context.Context, p *Publication, files []*File) (Destination, error) {
	if err := checkListable(files); err != nil {
		return nil, err
	}
	if err := refuseNextToIndex(ctx, p, files); err != nil {
		return nil, err
	}
	if err := chooseNames(ctx, p, files); err != nil {
		return nil, err
	}
	if p.Remote {
		return &objects{pub: p, files: files, drafts: make([]source.Draft, len(files))}, nil
	}
	return beginLocal(p, files)
}
