package http

// This file finds hf:// files in the huggingface_hub cache.

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/source"
)

// isYes reads a boolean as huggingface_hub does.
func isYes(text string) bool {
	return slices.Contains([]string{"1", "ON", "YES", "TRUE"}, strings.ToUpper(text))
}

// offlineSetting returns the name of the setting that forbids requests to the hub, or "".
func offlineSetting(env map[string]string) string {
	for _, name := range []string{"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"} { // the first that is set decides
		if env[name] != "" {
			if isYes(env[name]) {
				return name
			}
			return ""
		}
	}
	return ""
}

// A shelf is the location of an hf:// file in the huggingface_hub cache.
//
// Source: huggingface_hub guide "Understand caching". The folder models--org--name contains refs/REVISION, a file that
// contains a commit; snapshots/COMMIT/FILE; and .no_exist/COMMIT/FILE for files that are not in a commit.
type shelf struct {
	*revision
	ref    source.HF
	folder string // folder of the repository
}

func (h *Hub) shelfOf(uri string, env map[string]string) (shelf, bool) {
	ref, ok := source.ParseHF(uri)
	folder := hubCache(env)
	if !ok || ref.File == "" || folder == "" || !filepath.IsLocal(ref.File) ||
		!filepath.IsLocal(cmp.Or(ref.Rev, "main")) {
		return shelf{}, false
	}
	kind, name := kindOf(ref.Repo)
	name = kind + "--" + strings.ReplaceAll(name, "/", "--")
	if name != filepath.Base(name) {
		return shelf{}, false
	}
	return shelf{h.revision(ref), ref, filepath.Join(folder, name)}, true
}

// kindOf splits a repository's name into its kind (models, datasets) and the name itself.
func kindOf(repo string) (kind, name string) {
	for _, other := range []string{"datasets", "spaces"} {
		if rest, isOther := strings.CutPrefix(repo, other+"/"); isOther {
			return other, rest
		}
	}
	return "models", repo
}

// notedCommit returns the commit that the cache last recorded for the revision, or "".
func (s shelf) notedCommit() string {
	path := filepath.Join(s.folder, "refs", filepath.FromSlash(s.name))
	if regular.RefusePlanted(path) != nil {
		return ""
	}
	text, err := regular.ReadTrusted(path, regular.MaxSetting)
	if commit := strings.TrimSpace(string(text)); err == nil && IsCommit(commit) {
		return commit
	}
	return ""
}

// loadState returns the commit of this load, or "" if it is not known yet, and the error with which the hub
// could not be reached, if any.
func (s shelf) loadState() (commit string, away error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.commit, s.away
}

func (s shelf) at(kind, commit string) string {
	return filepath.Join(s.folder, kind, commit, filepath.FromSlash(s.ref.File))
}

// Cached returns the path of an hf:// file in the huggingface_hub cache, or "" if the file is not there or the
// commit is not known. The commit of a branch is the one that the hub returned in this load. In offline mode,
// it is the one that the cache last recorded.
func (h *Hub) Cached(uri string, env map[string]string) string {
	s, ok := h.shelfOf(uri, env)
	if !ok {
		return ""
	}
	commit, _ := s.loadState()
	if commit == "" && offlineSetting(env) != "" {
		commit = s.notedCommit()
	}
	if commit == "" {
		return ""
	}
	if path := s.at("snapshots", commit); isFile(path) {
		return path
	}
	return ""
}

// Missing returns the error for a file that is not cached and cannot be requested: the cache records that it is
// not in the commit, or the hub must not or cannot be asked. nil means that the hub should be asked.
func (h *Hub) Missing(uri string, env map[string]string) error {
	if name := offlineSetting(env); name != "" {
		return errs.WithRule(source.RuleNotCached, errs.New(errs.ErrNotFound,
			"not in the huggingface_hub cache, and %s is set", name))
	}
	s, ok := h.shelfOf(uri, env)
	if !ok {
		return nil
	}
	commit, away := s.loadState()
	switch {
	case commit != "" && isFile(s.at(".no_exist", commit)):
		return errs.WithRule(source.RuleNotCached, errs.New(errs.ErrNotFound,
			"not in commit %s, according to the huggingface_hub cache", commit))
	case away != nil:
		return errs.WithRule(source.RuleNotCached, fmt.Errorf(
			"%w: not in the huggingface_hub cache, and the Hub cannot be reached: %w", errs.ErrNotFound, away))
	}
	return nil
}

// Away switches to the cache after a request to the hub failed with err. It succeeds if the cache has the
// commit of the load. For a branch this is the commit that the cache last recorded, and Away adds a notice. All
// later files of the load then come from this commit.
func (h *Hub) Away(uri string, env map[string]string, err error) bool {
	s, ok := h.shelfOf(uri, env)
	if !ok || !errors.Is(err, errs.ErrIO) && !errors.Is(err, errs.ErrTimeout) {
		return false
	}
	if at, ok := errors.AsType[*errs.At](err); ok {
		err = at.Err
	}
	commit, _ := s.loadState()
	branch := commit == ""
	if branch {
		commit = s.notedCommit()
	}
	info, statErr := os.Stat(filepath.Join(s.folder, "snapshots", commit))
	if commit == "" || statErr != nil || !info.IsDir() {
		return false
	}
	s.mu.Lock()
	s.commit, s.away, s.done = commit, err, true
	s.mu.Unlock()
	if branch {
		source.Notice(fmt.Sprintf(
			"hf://%s: the Hub cannot be reached (%s): using commit %s of %s, the last one "+
				"in the huggingface_hub cache",
			s.ref.Repo, errs.Message(err), commit, s.name))
	}
	return true
}

// isFile reports whether a file of the cache exists, and neither the file nor the blob that it links to may
// have been planted by another user of the machine.
func isFile(path string) bool {
	real, err := filepath.EvalSymlinks(path)
	if err != nil || regular.RefusePlanted(path) != nil || regular.RefusePlanted(real) != nil {
		return false
	}
	info, err := os.Stat(real)
	return err == nil && info.Mode().IsRegular()
}

// hubHome returns the huggingface_hub folder, or "" if the user has no home folder.
func hubHome(env map[string]string) string {
	if home := env["HF_HOME"]; home != "" {
		return home
	}
	if folder := env["XDG_CACHE_HOME"]; folder != "" {
		return filepath.Join(folder, "huggingface")
	}
	if user := env["HOME"]; user != "" {
		return filepath.Join(user, ".cache", "huggingface")
	}
	return ""
}

// hubCache returns the download folder of huggingface_hub.
func hubCache(env map[string]string) string {
	if folder := cmp.Or(env["HF_HUB_CACHE"], env["HUGGINGFACE_HUB_CACHE"]); folder != "" {
		return folder
	}
	if home := hubHome(env); home != "" {
		return filepath.Join(home, "hub")
	}
	return ""
}
