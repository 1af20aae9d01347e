package cli

// This file defines the cache command, which lists and removes the prepared model state that the vLLM plug-in stores.

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/knob"
)

var cacheVerb = &verb{
	name: "cache", args: "list|clear [FOLDER]", least: 1, most: 2,
	words: [][]string{{"list", "clear"}},
	short: "list or remove the prepared models that the vLLM plug-in has stored",
	long: `
list shows the prepared models in FOLDER (default: OVERWIRE_PREPARED, or
overwire/prepared in the user's cache folder) with their size and time of last use, most
recent first. clear removes them, and unfinished files as well. Running engines are not
affected: they have the files open, and write new ones the next time they start. This
command does not touch OVERWIRE_CACHE, the folder that caches remote files.`,
	example: "overwire cache list",
	run: func(c *call) error {
		if !slices.Contains([]string{"list", "clear"}, c.args[0]) {
			return usage("cache %s: expected list or clear", c.args[0])
		}
		folder, err := preparedFolder(c.args[1:])
		if err != nil {
			return err
		}
		files, err := preparedFiles(folder)
		if err != nil {
			return err
		}
		if c.args[0] == "clear" {
			for _, file := range files {
				if err := os.Remove(filepath.Join(folder, file.Name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
					return errs.New(errs.ErrIO, "cache: %v", err)
				}
			}
		} else {
			files = slices.DeleteFunc(files, func(f prepared) bool { return f.Unfinished })
		}
		return c.show(map[string]any{"folder": folder, "files": files}, func(w io.Writer) {
			total := int64(0)
			for _, file := range files {
				total += file.Size
				fmt.Fprintf(w, "%10s  %s  %s\n", humanize.Bytes(uint64(file.Size)),
					file.Used.Local().Format(time.DateTime), file.Name)
			}
			what := map[bool]string{true: "removed", false: "kept"}[c.args[0] == "clear"]
			fmt.Fprintf(w, "%s: %s, %s %s\n", folder, countText(len(files), "file"), humanize.Bytes(uint64(total)),
				what)
		})
	},
}

// A prepared is one file in the folder.
type prepared struct {
	Name string    `json:"name"`
	Size int64     `json:"size"`
	Used time.Time `json:"used"`
	// Unfinished is set while the file is being written, and stays set if the writer dies.
	Unfinished bool `json:"unfinished"`
}

// preparedFolder returns the folder from the command line, the settings or the default.
func preparedFolder(asked []string) (string, error) {
	folder := knob.Prepared.Get()
	if len(asked) > 0 {
		folder = asked[0]
	}
	if folder != "" {
		return filepath.Abs(folder)
	}
	base, err := os.UserCacheDir()
	if err != nil {
		return "", usage("cache: cannot determine the default folder: %v; name a FOLDER", err)
	}
	return filepath.Join(base, "overwire", "prepared"), nil
}

// preparedFiles lists the prepared models in a folder, most recently used first. A missing
// folder has none. python/overwire/integrations/kept_model/keep_files.py defines the file names.
func preparedFiles(folder string) ([]prepared, error) {
	entries, err := os.ReadDir(folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, errs.New(errs.ErrIO, "cache: %v", err)
	}
	files := []prepared{}
	for _, entry := range entries {
		name := entry.Name()
		stem, rest, ok := strings.Cut(name, ".safetensors")
		isPartial := strings.HasPrefix(name, ".begun-") || strings.HasPrefix(name, "..begun-") // see atomicfile
		if !ok || !entry.Type().IsRegular() || !isPartial && (rest != "" || !isFingerprint(stem)) {
			continue
		}
		info, err := entry.Info()
		if err != nil {
			continue
		}
		files = append(files, prepared{name, info.Size(), info.ModTime(), isPartial})
	}
	slices.SortStableFunc(files, func(a, b prepared) int { return b.Used.Compare(a.Used) })
	return files, nil
}

// isFingerprint reports whether a file name's stem is a fingerprint. clear must not remove files with other names.
func isFingerprint(stem string) bool {
	return len(stem) == 40 && strings.Trim(stem, "0123456789abcdef") == ""
}
