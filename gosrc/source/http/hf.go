package http

// This file opens hf:// files: it resolves revisions to commits and finds the user's token.

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"net/http"
	"net/url"
	"path/filepath"
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

// takeSum records the SHA-256 of a large file from a response of the hub. The hub sends it as the ETag of the linked
// object. For small files it sends a shorter hash, which is ignored.
func (o *object) takeSum(resp *http.Response) {
	sum := strings.ToLower(strings.Trim(resp.Header.Get("X-Linked-ETag"), `"`))
	if b, err := hex.DecodeString(sum); err != nil || len(b) != sha256.Size {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.sum = sum
}

// IsCommit reports whether s is a full commit hash: a SHA-1 or a SHA-256.
func IsCommit(s string) bool {
	return (len(s) == 40 || len(s) == 64) && strings.Trim(s, "0123456789abcdef") == ""
}

// homeURL returns the URL of the first request.
func (o *object) homeURL() *url.URL {
	if o.revision == nil {
		return o.url
	}
	u, err := url.Parse(o.at(o.revision.commitNow()))
	if err != nil { // cannot happen: openScheme has parsed the same URL with the revision's name
		return o.url
	}
	return u
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
