package http

// This file opens and lists hf:// files, also in the huggingface_hub cache: it resolves revisions to commits and finds
// the user's token.

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/source"
)

// A Hub opens the files of one load. All files of one repository and revision come from one commit, even if a branch
// moves during the load. The commit is the one in the hub's first response. If the hub does not send one
// (X-Repo-Commit), files are not tied to a commit. The zero value is ready to use. A Hub is safe for concurrent use.
type Hub struct {
	mu        sync.Mutex
	revisions map[string]*revision
}

// Open requests the first bytes of an object.
func (h *Hub) Open(ctx context.Context, uri string, opt source.Options) (*Source, error) {
	ref, ok := source.ParseHF(uri)
	if !ok {
		return openNamed(ctx, uri, opt, nil)
	}
	r := h.revision(ref)
	select { // one caller opens the first file and learns the commit
	case r.asking <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if r.settled() {
		<-r.asking
		return openNamed(ctx, uri, opt, r)
	}
	defer func() { <-r.asking }()
	s, err := openNamed(ctx, uri, opt, r)
	if err == nil {
		r.settleRevision()
	}
	return s, err
}

func (h *Hub) revision(ref source.HF) *revision {
	name := cmp.Or(ref.Rev, "main")
	h.mu.Lock()
	defer h.mu.Unlock()
	key := ref.Repo + "@" + name
	r := h.revisions[key]
	if r == nil {
		r = &revision{name: name, asking: make(chan struct{}, 1)}
		if IsCommit(name) {
			r.commit = name
		}
		if h.revisions == nil {
			h.revisions = map[string]*revision{}
		}
		h.revisions[key] = r
	}
	return r
}

// Walk lists the files of a repository or of a folder in it, sorted, and returns its URI at the commit of the list. If
// the hub must not or cannot be asked, Walk lists the files in the huggingface_hub cache, at the commit of this load or
// at the commit that the cache last recorded.
func (h *Hub) Walk(ctx context.Context, uri string, opt source.Options) (at string, files []source.Entry, err error) {
	ref, ok := source.ParseHF(uri)
	if !ok || !source.Folder(uri) {
		return "", nil, errs.In("open", uri, errs.New(errs.ErrArgument,
			"expected a folder: hf://organisation/name or a path that ends in /"))
	}
	some := source.Beside(uri, "x") // some functions need the URI of a file
	commit, files, err := "", nil, h.Missing(some, opt.Env)
	if offlineSetting(opt.Env) == "" && err == nil {
		commit, files, err = listFiles(ctx, ref, some, opt)
		if rev := strings.ToLower(ref.Rev); err == nil && IsCommit(rev) && commit != "" && commit != rev {
			err = errs.New(errs.ErrCorrupt, "the Hub lists commit %s, but %s was requested", commit, rev)
		}
	}
	if err != nil && ctx.Err() == nil {
		if s, ok := h.shelfOf(some, opt.Env); ok && (offlineSetting(opt.Env) != "" || h.Away(some, opt.Env, err)) {
			if commit, _ = s.loadState(); commit == "" {
				commit = s.notedCommit()
			}
			if near := shelvedFiles(filepath.Join(s.folder, "snapshots", commit)); commit != "" && len(near) > 0 {
				files, err = near, nil
			}
		}
	}
	if err != nil {
		return "", nil, errs.Place("open", uri, "", -1, err)
	}
	if ref.Rev = commit; commit == "" {
		ref, _ = source.ParseHF(uri)
	}
	files = inFolder(files, ref.File)
	if len(files) == 0 {
		return "", nil, errs.In("open", uri, errs.New(errs.ErrNotFound, "the folder has no files"))
	}
	return ref.String(), files, nil
}

// A revision is a branch, tag or commit of a repository, and the commit that it referred to when the load began.
type revision struct {
	name   string
	asking chan struct{}

	mu     sync.Mutex
	commit string // "" until a response names it
	done   bool   // a file was opened: the commit is known, or the hub does not send it
	away   error  // the error of a hub that could not be reached; the hub is not asked again
}

func (r *revision) settled() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.done || r.commit != ""
}

func (r *revision) settleRevision() {
	r.mu.Lock()
	r.done = true
	r.mu.Unlock()
}

// commitNow returns the revision to request.
func (r *revision) commitNow() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return cmp.Or(r.commit, r.name)
}

// takeCommit records the commit from a response of the hub. It refuses a commit that differs from the recorded one.
func (r *revision) takeCommit(resp *http.Response) error {
	c := strings.ToLower(resp.Header.Get("X-Repo-Commit"))
	if !IsCommit(c) {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.commit == "" {
		r.commit = c
	}
	if r.commit != c {
		return errs.New(errs.ErrCorrupt, "the Hub returned commit %s, but this load began with commit %s", c, r.commit)
	}
	return nil
}

// IsCommit reports whether s is a full commit hash: a SHA-1 or a SHA-256.
func IsCommit(s string) bool {
	return (len(s) == 40 || len(s) == 64) && strings.Trim(s, "0123456789abcdef") == ""
}

// hubURL returns a function that maps a revision to the hub's URL of an hf:// file. If the options have no
// token, it adds the user's token from the environment or from the file that a huggingface_hub login wrote.
func hubURL(uri string, opt source.Options) (func(rev string) string, source.Options, error) {
	r, ok := source.ParseHF(uri)
	if !ok || r.Repo == "" || strings.ContainsAny(r.Repo, ":?#%\\ ") || r.File == "" || strings.HasSuffix(r.File, "/") {
		return nil, opt, errs.New(errs.ErrArgument, "expected hf://organisation/name/file@revision")
	}
	for _, part := range strings.Split(r.Repo+"/"+r.File, "/") {
		if part == "" || part == "." || part == ".." {
			return nil, opt, errs.New(errs.ErrArgument, "invalid hf:// URI: its path contains the element %q", part)
		}
	}
	if opt.Storage["token"] == "" {
		if t := hubToken(opt.Env); t != "" {
			storage := map[string]string{}
			maps.Copy(storage, opt.Storage)
			storage["token"] = t
			opt.Storage = storage
		}
	}
	return func(rev string) string {
		return hubEndpoint(opt.Env) + "/" + source.EscapePath(r.Repo) + "/resolve/" + url.PathEscape(rev) + "/" +
			source.EscapePath(r.File)
	}, opt, nil
}

// hubEndpoint returns the address of the hub or of a mirror.
func hubEndpoint(env map[string]string) string {
	return cmp.Or(strings.TrimRight(env["HF_ENDPOINT"], "/"), "https://huggingface.co")
}

func hubToken(env map[string]string) string {
	if isYes(env["HF_HUB_DISABLE_IMPLICIT_TOKEN"]) {
		return ""
	}
	if t := strings.TrimSpace(cmp.Or(env["HF_TOKEN"], env["HUGGING_FACE_HUB_TOKEN"])); t != "" {
		return t
	}
	path := env["HF_TOKEN_PATH"]
	if home := hubHome(env); path == "" && home != "" {
		path = filepath.Join(home, "token")
	}
	if path == "" {
		return ""
	}
	b, err := regular.Read(path, regular.MaxSetting)
	if err != nil {
		return "" // not logged in
	}
	return strings.TrimSpace(string(b))
}

// maxListing is the largest file list that is read from a server, in bytes.
const maxListing = 64 << 20

// inFolder returns the files below a folder of a repository, sorted, with names relative to it.
func inFolder(all []source.Entry, folder string) (files []source.Entry) {
	for _, f := range all {
		name, ok := strings.CutPrefix(f.Name, folder)
		if ok && name != "" && filepath.IsLocal(name) && !strings.ContainsAny(name, "\\\x00") {
			files = append(files, source.Entry{Name: name, Size: f.Size})
		}
	}
	slices.SortFunc(files, func(a, b source.Entry) int { return strings.Compare(a.Name, b.Name) })
	return files
}

// listFiles requests the list of files of a repository and the commit that contains them.
//
// Source: Hugging Face Hub API, GET /api/models/REPO/revision/REVISION?blobs=true.
func listFiles(ctx context.Context, ref source.HF, file string, opt source.Options) (commit string,
	files []source.Entry, err error) {
	_, opt, err = hubURL(file, opt) // checks the repository's name
	if err != nil {
		return "", nil, err
	}
	kind, repo := kindOf(ref.Repo)
	address := hubEndpoint(opt.Env) + "/api/" + kind + "/" + source.EscapePath(repo) + "/revision/" +
		url.PathEscape(cmp.Or(ref.Rev, "main")) + "?blobs=true"
	opt.Outline = source.Outline{Most: maxListing}
	s, err := openScheme(ctx, address, opt, nil)
	if err != nil {
		return "", nil, err
	}
	defer s.Close()
	if s.Size() > maxListing {
		return "", nil, errs.New(errs.ErrFormat, "the Hub's file list has %d bytes: expected at most %d", s.Size(),
			maxListing)
	}
	text := make([]byte, s.Size())
	if err := s.ReadAt(ctx, text, 0); err != nil {
		return "", nil, err
	}
	var answer struct {
		SHA      string `json:"sha"`
		Siblings []struct {
			Name string `json:"rfilename"`
			Size *int64 `json:"size"`
		} `json:"siblings"`
	}
	if err := json.Unmarshal(text, &answer); err != nil || answer.SHA != "" && !IsCommit(answer.SHA) {
		return "", nil, errs.New(errs.ErrIO, "the Hub's response is not a list of files")
	}
	for _, f := range answer.Siblings {
		e := source.Entry{Name: f.Name, Size: -1}
		if f.Size != nil && *f.Size >= 0 {
			e.Size = *f.Size
		}
		files = append(files, e)
	}
	return answer.SHA, files, nil
}

// shelvedFiles returns the files of a snapshot in the huggingface_hub cache.
func shelvedFiles(snapshot string) (files []source.Entry) {
	_ = filepath.WalkDir(snapshot, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil
		}
		name, relErr := filepath.Rel(snapshot, path)
		if st, err := os.Stat(path); relErr == nil && err == nil && isFile(path) {
			files = append(files, source.Entry{Name: filepath.ToSlash(name), Size: st.Size()})
		}
		return nil
	})
	return files
}

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
			"hf://%s: the Hub cannot be reached (%s): using commit %s of %s, the last one in the huggingface_hub cache",
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
