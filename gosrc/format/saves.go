package format

// This file distinguishes the files of different saves of a checkpoint: a folder that is replaced, file by file
// or at once, must not give a mixture of both.

import (
	"cmp"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// SaveKey is the metadata entry with the id of a save, which is the same in all files of one save of a
// checkpoint. Other files do not have it. Python writes it (checkpoints/manifest.py).
const SaveKey = "overwire.checkpoint"

// checkpointParts are the folders of a checkpoint that contain files of one save.
var checkpointParts = []string{"/training/", "/"}

// refuseMixture refuses files of one checkpoint, by folders and names, that are from several saves.
func refuseMixture(ix *tensor.Index) error {
	saves := map[string]*tensor.Source{}
	for i := range ix.Sources {
		s := &ix.Sources[i]
		at := source.LocationOf(s.URI)
		folder, name := at.Directory, at.Name
		if !at.Remote {
			end := strings.LastIndexByte(at.Path, '/') + 1
			folder, name = at.Path[:end], at.Path[end:]
		}
		if n, ok := modelfiles.ParseName(name); !ok || n.Stem != "model" || n.Variant != "" {
			continue
		}
		for _, part := range checkpointParts {
			if root, ok := strings.CutSuffix(folder, part); ok {
				folder = root
				break
			}
		}
		first := cmp.Or(saves[folder], s)
		if saves[folder] = first; first.Metadata[SaveKey] != s.Metadata[SaveKey] {
			return placeError(s.URI, errs.New(errs.ErrCorrupt, "it is from another save of the checkpoint than %s: "+
				"it was replaced meanwhile, or parts of two were mixed", errs.RedactURI(first.URI)))
		}
	}
	return nil
}
