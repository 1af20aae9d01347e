package format

// This file selects the model among the files of a folder, by the rules of docs/folders.md.

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/source"
)

// A family is one model in a folder: an index, a single file, or shards without an index.
type family struct {
	modelfiles.Name // name of the first file
	paths           []string
	numbers         []int // shard numbers
}

// divideFamilies divides the files of a folder into families. unlisted contains the files that are marked as parts of
// a save but are in no index; they are not models.
func divideFamilies(paths []string) (all []*family, unlisted []string) {
	by := map[modelfiles.Name]*family{}
	for _, path := range paths {
		n, ok := modelfiles.ParseName(source.Name(path))
		switch {
		case !ok:
			continue
		case n.Marked && !n.Index:
			unlisted = append(unlisted, path)
			continue
		}
		key := n
		key.Number = 0
		f := by[key]
		if f == nil || n.Index { // each index is a model
			f = &family{Name: n}
			by[key] = f
			all = append(all, f)
		}
		f.paths, f.numbers = append(f.paths, path), append(f.numbers, n.Number)
	}
	return all, unlisted
}

// lackingShards describes the missing shards of a family without an index, or returns "" if it is complete.
func (f *family) lackingShards() string {
	if f.Index || f.Of == 0 {
		return ""
	}
	from := 1
	if slices.Contains(f.numbers, 0) {
		from = 0 // some writers count from 0
	}
	var numbers []string
	for n := from; n < from+f.Of && len(numbers) < 5; n++ {
		if !slices.Contains(f.numbers, n) {
			numbers = append(numbers, fmt.Sprint(n))
		}
	}
	if len(numbers) == 0 && len(f.numbers) == f.Of {
		return ""
	}
	if len(numbers) == 0 {
		return fmt.Sprintf("the folder has %d shards, but according to their names there are %d", len(f.numbers), f.Of)
	}
	noun, verb := "shard", "is"
	if len(numbers) > 1 {
		noun, verb = "shards", "are"
	}
	return fmt.Sprintf("it has only %d of %d shards: %s %s %s missing", len(f.numbers), f.Of, noun,
		strings.Join(numbers, ", "), verb)
}

// preferDefaults drops variants if their default is present, shards without an index if the same model is present as
// a single file, and consolidated weights if "model" is present.
func preferDefaults(all []*family) []*family {
	has := func(of func(f *family) bool) bool { return slices.ContainsFunc(all, of) }
	return slices.DeleteFunc(slices.Clone(all), func(f *family) bool {
		return f.Variant != "" && has(func(o *family) bool { return o.Stem == f.Stem && o.Variant == "" }) ||
			f.Of > 0 && has(func(o *family) bool {
				return o.Stem == f.Stem && o.Variant == f.Variant && o.Of == 0 && !o.Index
			}) ||
			f.Stem == "consolidated" && has(func(o *family) bool { return o.Stem == "model" })
	})
}

// chooseModel selects the model among the files of a folder. It sets Files.Index to an index.json that the caller
// must read, or sets Files.URIs.
func chooseModel(dir string, names []string) (Files, error) {
	all, unlisted := divideFamilies(names)
	some := preferDefaults(all)
	var indexes, sharded []*family
	var files []string
	variants := map[string]bool{}
	for _, f := range some {
		switch {
		case f.Index:
			indexes = append(indexes, f)
		case f.Of > 0:
			sharded = append(sharded, f)
		}
		if f.Variant != "" {
			variants[f.Variant] = true
		}
		if !f.Index {
			files = append(files, f.paths...)
		}
	}
	for _, name := range names {
		if modelfiles.IsPart(source.Name(name)) && len(indexes) == 0 {
			return Files{}, placeError(dir, errs.New(errs.ErrNotSupported, "%s", modelfiles.KindOfFolder(names)))
		}
	}
	switch {
	case len(indexes) > 1, len(indexes) == 0 && (len(variants) > 1 || len(sharded) > 1):
		var names []string
		for _, f := range some {
			names = append(names, f.paths[0])
		}
		return Files{}, placeError(dir, errs.New(errs.ErrArgument, "the folder contains several models; name one "+
			"of them: %s",
			strings.Join(names, ", ")))
	case len(indexes) == 1:
		return Files{Index: indexes[0].paths[0]}, nil
	case len(files) == 0 && len(unlisted) > 0:
		return Files{}, placeError(dir, errs.New(errs.ErrFormat,
			"%s is a shard of an unfinished save, or its index.json is missing: save or fetch "+
				"the model again",
			filepath.Base(unlisted[0])))
	case len(files) == 0:
		return Files{}, placeError(dir, errs.New(errs.ErrNotFound, "no %s file in this folder%s", suffix,
			foldersBelow(dir, names)))
	}
	for _, f := range sharded {
		if why := f.lackingShards(); why != "" {
			return Files{}, placeError(dir, errs.New(errs.ErrFormat,
				"%s has no index.json, and %s: fetch the model again", filepath.Base(f.paths[0]), why))
		}
	}
	slices.Sort(files)
	return Files{URIs: files, listed: true}, nil
}

// A Model is one model of a local folder. Names are the paths that open it. Paths are its files, including the index.
type Model struct{ Names, Paths []string }

// ofLibraries are the base names that libraries look for, regardless of other files in the folder.
var ofLibraries = []string{
	"model", "diffusion_pytorch_model", "consolidated", "adapter_model", "pytorch_lora_weights",
}

// Models returns the models of a folder; the folder's default model is last. The other models are those with their own
// index, variants, and models with a name in ofLibraries. names are the files of a remote folder; nil means that the
// folder is local.
func Models(ctx context.Context, dir string, names []string, open Opener) (_ []Model, err error) {
	if names == nil {
		if names, err = namesOf(dir); err != nil {
			return nil, err
		}
	}
	main, err := chooseFiles(ctx, dir, names, open)
	if err != nil {
		return nil, err
	}
	sets := []Files{main}
	all, _ := divideFamilies(names)
	for _, f := range all {
		if f.Index && f.paths[0] != main.Index {
			set, err := readShards(ctx, source.LocationOf(f.paths[0]), open)
			if err != nil {
				return nil, err
			}
			sets = append(sets, set)
		}
	}
	for _, f := range all {
		known := slices.Contains(ofLibraries, f.Stem) || main.Index == "" && f.Variant != ""
		known = known && !f.Index && f.lackingShards() == ""
		for _, set := range sets {
			known = known && !slices.ContainsFunc(f.paths, func(path string) bool {
				return slices.Contains(set.URIs, path)
			})
		}
		if known {
			sets = append(sets, Files{URIs: f.paths})
		}
	}
	var models []Model
	for _, set := range append(sets[1:], main) {
		m := Model{Names: set.URIs, Paths: slices.Clone(set.URIs)}
		if set.Index != "" {
			m.Names, m.Paths = []string{set.Index}, append(m.Paths, set.Index)
		}
		models = append(models, m)
	}
	return models, nil
}
