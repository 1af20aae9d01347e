package http

// This file lists folders of servers that return JSON listings: overwire's own server, and nginx with
// autoindex_format json.

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

// The limits of one folder, including its subfolders.
const (
	mostEntries = 100_000
	mostDepth   = 16
)

// Walk lists the files of a folder and its subfolders, sorted. It returns errs.ErrNotSupported if the server
// does not return JSON listings.
func Walk(ctx context.Context, uri string, opt source.Options) (files []source.Entry, err error) {
	own := maps.Clone(opt.Storage)
	if own == nil {
		own = map[string]string{}
	}
	maps.DeleteFunc(own, func(name, _ string) bool { return strings.EqualFold(name, source.HeaderPrefix+"Accept") })
	own[source.HeaderPrefix+"Accept"] = "application/json"
	opt.Storage = own
	w := &walk{ctx: ctx, opt: opt}
	if err := w.listFolder(uri, ""); err != nil {
		return nil, errs.Place("open", uri, "", -1, err)
	}
	if len(w.files) == 0 {
		return nil, errs.In("open", uri, errs.New(errs.ErrNotFound, "the folder has no files"))
	}
	slices.SortFunc(w.files, func(a, b source.Entry) int { return strings.Compare(a.Name, b.Name) })
	return w.files, nil
}

type walk struct {
	ctx   context.Context
	opt   source.Options
	files []source.Entry
	seen  int // number of entries
}

// listFolder adds the files of a folder. below is the folder's path relative to the first one, with a trailing slash.
func (w *walk) listFolder(uri, below string) error {
	text, err := w.readListing(uri)
	if err != nil {
		return err
	}
	var entries []struct {
		Name string `json:"name"`
		Type string `json:"type"`
		Size *int64 `json:"size"`
	}
	if json.Unmarshal(text, &entries) != nil {
		return errs.New(errs.ErrNotSupported, "this server does not list folders: its response is not a list of files")
	}
	if w.seen += len(entries); w.seen > mostEntries || strings.Count(below, "/") > mostDepth {
		return errs.New(errs.ErrNotSupported,
			"the folder has more than %d entries, or folders nested more than %d deep", mostEntries, mostDepth)
	}
	for _, e := range entries {
		if !filepath.IsLocal(e.Name) || e.Name == "." || strings.ContainsAny(e.Name, "/\\\x00") {
			return errs.New(errs.ErrFormat, "the server lists %q, which is not a valid file name", e.Name)
		}
		switch {
		case strings.HasPrefix(e.Name, "."):
		case e.Type == "directory":
			if err := w.listFolder(source.Below(uri, e.Name), below+e.Name+"/"); err != nil {
				return err
			}
		case e.Type == "file":
			one := source.Entry{Name: below + e.Name, Size: -1}
			if e.Size != nil && *e.Size >= 0 {
				one.Size = *e.Size
			}
			w.files = append(w.files, one)
		}
	}
	return nil
}

// readListing returns the server's response for a folder if it is JSON.
func (w *walk) readListing(uri string) ([]byte, error) {
	opt := w.opt
	opt.Outline = source.Outline{Most: maxListing}
	s, err := openScheme(w.ctx, uri, opt, nil)
	if errors.Is(err, errs.ErrNotFound) || errors.Is(err, errs.ErrPermission) {
		return nil, errs.New(errs.ErrNotSupported, "this server does not list folders, or the folder is missing: %v",
			err)
	}
	if err != nil {
		return nil, err
	}
	defer s.Close()
	kind, _, _ := strings.Cut(s.o.answer.Get("Content-Type"), ";")
	if !strings.EqualFold(strings.TrimSpace(kind), "application/json") || s.Size() > maxListing {
		return nil, errs.New(errs.ErrNotSupported, "this server does not list folders in JSON")
	}
	text := make([]byte, s.Size())
	return text, s.ReadAt(w.ctx, text, 0)
}
