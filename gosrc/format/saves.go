package format

// This file detects files of different saves of a checkpoint, so that a folder that is being replaced never yields a
// mixture.

import (
	"cmp"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// SaveKey is the metadata entry with the id of a save. All files of one save of a checkpoint have the same id; other
// files have none. Python writes it (checkpoints/manifest.py).
const SaveKey = "overwire.checkpoint"

// checkpointParts are the paths inside a checkpoint of the folders with files of one save.
var checkpointParts = []string{"/training/", "/"}

// refuseMixture refuses files of one checkpoint, recognized by folder and name, that are from several saves.
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
			return placeError(s.URI, errs.New(errs.ErrCorrupt, "%s is from another save of this checkpoint: "+
				"it was replaced during the load, or files of two saves were mixed", errs.RedactURI(first.URI)))
		}
	}
	return nil
}
