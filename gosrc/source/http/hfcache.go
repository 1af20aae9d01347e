package http

// This file finds files of hf:// in the cache of huggingface_hub.

import (
	"cmp"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/source"
)

// Offline reports whether huggingface_hub's setting forbids to ask the hub.
func Offline(env map[string]string) bool {
	return slices.Contains([]string{"1", "ON", "YES", "TRUE"}, strings.ToUpper(env["HF_HUB_OFFLINE"]))
}

// Cached is the path of a file of hf:// in huggingface_hub's cache, "" if it is not
// there, or if the commit is not known: that of a branch is what the hub said to
// this load, or offline what the cache noted last.
//
// Source: huggingface_hub's guide "Understand caching": models--org--name holds
// refs/REVISION, a file with a commit, and snapshots/COMMIT/FILE.
func (h *Hub) Cached(uri string, env map[string]string) string {
	ref, ok := source.ParseHF(uri)
	folder := hubCache(env)
	if !ok || ref.File == "" || folder == "" || !filepath.IsLocal(ref.File) || !filepath.IsLocal(cmp.Or(ref.Rev, "main")) {
		return ""
	}
	kind, name := "models", ref.Repo
	for _, other := range []string{"datasets", "spaces"} {
		if rest, found := strings.CutPrefix(ref.Repo, other+"/"); found {
			kind, name = other, rest
		}
	}
	name = kind + "--" + strings.ReplaceAll(name, "/", "--")
	if name != filepath.Base(name) {
		return ""
	}
	folder = filepath.Join(folder, name)

	r := h.revision(ref)
	r.mu.Lock()
	commit := r.commit
	r.mu.Unlock()
	if commit == "" && Offline(env) {
		noted, err := regular.Read(filepath.Join(folder, "refs", filepath.FromSlash(r.name)), regular.MaxSetting)
		if err != nil {
			return ""
		}
		commit = strings.TrimSpace(string(noted))
	}
	if !isCommit(commit) {
		return ""
	}
	path := filepath.Join(folder, "snapshots", commit, filepath.FromSlash(ref.File))
	if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() {
		return ""
	}
	return path
}

// hubHome is huggingface_hub's folder, "" if the user has none.
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

// hubCache is the folder of its downloads.
func hubCache(env map[string]string) string {
	if folder := cmp.Or(env["HF_HUB_CACHE"], env["HUGGINGFACE_HUB_CACHE"]); folder != "" {
		return folder
	}
	if home := hubHome(env); home != "" {
		return filepath.Join(home, "hub")
	}
	return ""
}
