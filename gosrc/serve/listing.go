package serve

// This file formats listings of folders, as JSON in nginx's format (autoindex_format json) or as an HTML page.

import (
	"fmt"
	"html"
	"net/url"
	"strings"
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
