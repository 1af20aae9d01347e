package serve

// This file lists folders, as JSON in nginx's format (autoindex_format json) or as an HTML page.

import (
	"encoding/json"
	"fmt"
	"html"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// An entry is a file or a folder in a listing.
type entry struct {
	Name string `json:"name"`
	Type string `json:"type"` // "file" or "directory"
	Time string `json:"mtime"`
	Size int64  `json:"size,omitempty"` // only set for files
}

// isHidden reports whether a path has a hidden element.
func isHidden(name string) bool { return strings.HasPrefix(name, ".") || strings.Contains(name, "/.") }

// entriesOf lists an open folder, sorted: its subfolders, and its regular files, including links to files below
// the served folder. Links to folders are omitted because they could form a loop. Hidden names are omitted.
func (s *Server) entriesOf(name string, dir *os.File) (all []entry, err error) {
	list, err := dir.ReadDir(-1)
	if err != nil {
		return nil, err
	}
	for _, e := range list {
		if isHidden(e.Name()) {
			continue
		}
		info, err := e.Info()
		if err == nil && info.Mode().Type() == fs.ModeSymlink {
			if info, err = s.root.Stat(path.Join(name, e.Name())); err == nil && info.IsDir() {
				continue
			}
		}
		if err != nil || !info.IsDir() && !info.Mode().IsRegular() {
			continue
		}
		one := entry{e.Name(), "file", info.ModTime().UTC().Format(http.TimeFormat), info.Size()}
		if info.IsDir() {
			one.Type, one.Size = "directory", 0
		}
		all = append(all, one)
	}
	slices.SortFunc(all, func(a, b entry) int { return strings.Compare(a.Name, b.Name) })
	return all, nil
}

// answerFolder responds with the listing of an open folder, as a page if the client accepts HTML, as browsers do.
func (s *Server) answerFolder(w http.ResponseWriter, r *http.Request, name string, dir *os.File) {
	isPage := strings.Contains(r.Header.Get("Accept"), "text/html")
	if !strings.HasSuffix(r.URL.Path, "/") {
		if !isPage { // a program would mistake the listing for a file
			http.NotFound(w, r)
			return
		}
		to := url.URL{Path: "/" + strings.Trim(r.URL.Path, "/") + "/"} // //NAME/ would be a host
		http.Redirect(w, r, to.EscapedPath(), http.StatusMovedPermanently)
		return
	}
	all, err := s.entriesOf(name, dir)
	if err != nil {
		http.Error(w, "cannot read the folder", http.StatusInternalServerError)
		return
	}
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(s.opt.Patience))
	h := w.Header()
	h.Set("Cache-Control", "no-store")
	h.Set("Vary", "Accept")
	h.Set("X-Content-Type-Options", "nosniff")
	if isPage {
		h.Set("Content-Type", "text/html; charset=utf-8")
		h.Set("Content-Security-Policy", "default-src 'none'")
		_, _ = w.Write(pageOf(r.URL.Path, all))
		return
	}
	h.Set("Content-Type", "application/json")
	all = slices.DeleteFunc(all, func(e entry) bool { return !utf8.ValidString(e.Name) }) // not valid in JSON
	text, _ := json.Marshal(append([]entry{}, all...))                                    // cannot fail
	_, _ = w.Write(text)
}

// pageOf renders a listing as HTML. Names are untrusted: they are escaped, and each link begins with ./, so it
// cannot lead to another scheme or host.
func pageOf(at string, all []entry) []byte {
	var b strings.Builder
	title := html.EscapeString(strings.ToValidUTF8(at, "\ufffd"))
	fmt.Fprintf(&b, "<!doctype html><html><head><meta charset=\"utf-8\"><title>%s</title></head>", title)
	fmt.Fprintf(&b, "<body><h1>%s</h1><ul>\n", title)
	if strings.Trim(at, "/") != "" {
		b.WriteString("<li><a href=\"../\">..</a></li>\n")
	}
	for _, e := range all {
		tail, size := "", fmt.Sprintf(" (%d bytes)", e.Size)
		if e.Type == "directory" {
			tail, size = "/", ""
		}
		fmt.Fprintf(&b, "<li><a href=\"./%s%s\">%s%s</a>%s</li>\n", html.EscapeString(url.PathEscape(e.Name)), tail,
			html.EscapeString(strings.ToValidUTF8(e.Name, "\ufffd")), tail, size)
	}
	b.WriteString("</ul></body></html>\n")
	return []byte(b.String())
}
