package cli

// This file has the verb cache: what the plug-in for vLLM has kept of models.

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
	short: "list or remove what the plug-in for vLLM keeps of models",
	long: `
list shows the files of prepared state in FOLDER (default: OVERWIRE_PREPARED, or
overwire/prepared in the cache folder of the user): size and last use, the latest
first. clear removes them, and what writers that are gone have left. Engines that
run are not hurt: they have the files open, and write them anew at a later start.
What OVERWIRE_CACHE keeps of stores is another folder, which this verb leaves alone.`,
	example: "overwire cache list",
	run: func(c *call) error {
		if !slices.Contains([]string{"list", "clear"}, c.args[0]) {
			return usage("cache: %s is neither list nor clear", c.args[0])
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

// A prepared is a file of the folder.
type prepared struct {
	Name string    `json:"name"`
	Size int64     `json:"size"`
	Used time.Time `json:"used"`
	// Unfinished: its writer has not ended, or never will.
	Unfinished bool `json:"unfinished"`
}

// preparedFolder is the folder asked for, or the one of the settings.
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
		return "", usage("cache: name a FOLDER: %v", err)
	}
	return filepath.Join(base, "overwire", "prepared"), nil
}

// preparedFiles lists the files of a folder, the last used first; none of one that is not there.
// The names are those that python/overwire/integrations/shared/prepared.py gives.
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

// isFingerprint tells a file of ours from others, which clear must not remove.
func isFingerprint(stem string) bool {
	return len(stem) == 40 && strings.Trim(stem, "0123456789abcdef") == ""
}
