package source

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/url"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
)

// This file parses URIs, so that formats can find the shards next to an index without knowing any store.

// A Location is a parsed path or URI.
type Location struct {
	URI    string // as the user wrote it
	Scheme string // in lower case; "" for a local path
	Path   string // local: the file's path on this host; remote: the result of Path
	Remote bool
	// For a remote URI, Name, Folder and Directory are the results of the functions with the same names.
	Name      string
	Folder    bool
	Directory string
}

// LocationOf parses a path or URI.
func LocationOf(uri string) Location {
	l := Location{URI: uri, Scheme: Scheme(uri), Path: uri, Remote: Remote(uri)}
	if l.Remote {
		l.Path, l.Name, l.Folder, l.Directory = Path(uri), Name(uri), Folder(uri), Directory(uri)
	} else if path, ok := Local(uri); ok {
		l.Path = path
	}
	return l
}

// Scheme returns the scheme of a URI in lower case, or "" for a local path.
func Scheme(uri string) string {
	s, _, ok := strings.Cut(uri, "://")
	if !ok || strings.ContainsAny(s, "/\\.") {
		return ""
	}
	return strings.ToLower(s)
}

// WithoutScheme returns the path of a valid file:// URI. It returns other names unchanged.
func WithoutScheme(uri string) string {
	if path, ok := Local(uri); ok {
		return path
	}
	return uri
}

// Remote reports whether a name is a URI of something other than a local file.
func Remote(uri string) bool {
	s := Scheme(uri)
	return s != "" && s != "file"
}

// Local returns the file path that a plain path or a file:// URI refers to; ok is false for any other URI.
func Local(uri string) (path string, ok bool) {
	switch Scheme(uri) {
	case "":
		return uri, true
	case "file":
		return pathOfFile(uri)
	}
	return "", false
}

// FilePath returns the path of a file:// URI on this host, with %XX escapes decoded. It refuses an unescaped ?
// or #: some readers end the path there, others treat it as part of the name.
func FilePath(uri string) (string, error) {
	path, ok := pathOfFile(uri)
	if !ok {
		return "", errs.In("open", uri, errs.New(errs.ErrArgument,
			"not the URI of a local file: expected file:///path, with ? written as %%3F and # as %%23"))
	}
	return path, nil
}

func pathOfFile(uri string) (path string, ok bool) {
	u, err := url.Parse(uri)
	if err != nil || (u.Host != "" && u.Host != "localhost") || u.Path == "" || strings.ContainsAny(uri, "?#") ||
		strings.Contains(u.Path, "\x00") {
		return "", false
	}
	return u.Path, true
}

// Path returns a URI up to the end of the object's name: without query and fragment, and for hf:// without revision.
func Path(uri string) string {
	head, _ := splitURI(uri)
	return head
}

// Folder reports whether a URI names a folder: it ends in a slash, or is a bucket or a whole hf:// repository.
func Folder(uri string) bool {
	if r, ok := ParseHF(uri); ok {
		return r.File == "" || strings.HasSuffix(r.File, "/")
	}
	return strings.HasSuffix(Path(uri), "/") || isBucket(uri)
}

// Directory returns the URI of a remote folder. It appends a slash if the URI would otherwise look like a file.
func Directory(uri string) string {
	if Folder(uri) && !isBucket(uri) {
		return uri
	}
	if r, ok := ParseHF(uri); ok {
		r.File += "/"
		return r.String()
	}
	head, tail := splitURI(uri)
	return head + "/" + tail
}

// Below returns the URI of the subfolder name of the remote folder dir, or dir if name is "".
func Below(dir, name string) string {
	if name == "" {
		return dir
	}
	return Beside(dir, name+"/")
}

// isBucket reports whether an S3 URI names a bucket without a trailing slash.
func isBucket(uri string) bool { return Scheme(uri) == "s3" && strings.Count(uri, "/") == 2 }

// Name returns the last path element of a URI, in the form that Beside accepts.
func Name(uri string) string {
	head := Path(uri)
	name := head[strings.LastIndexByte(head, '/')+1:]
	if plain, err := url.PathUnescape(name); err == nil && isWeb(uri) && !strings.Contains(plain, "/") {
		return plain
	}
	return name
}

// Beside returns the URI of a file in the same folder as uri, or in uri itself if that is a folder. The name
// may contain slashes. A query is preserved because it may be a signature that is valid for the whole folder.
func Beside(uri, name string) string {
	if r, ok := ParseHF(uri); ok {
		r.File = r.File[:strings.LastIndexByte(r.File, '/')+1] + name
		return r.String()
	}
	head, tail := splitURI(uri)
	if isWeb(uri) {
		name = EscapePath(name)
	}
	return head[:strings.LastIndexByte(head, '/')+1] + name + tail
}

// EscapePath escapes the elements of a path for a URL.
func EscapePath(path string) string {
	return strings.ReplaceAll(url.PathEscape(path), "%2F", "/")
}

// EscapeGlob escapes the pattern characters of a path for filepath.Glob.
func EscapeGlob(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}

func isWeb(uri string) bool { return Scheme(uri) == "http" || Scheme(uri) == "https" }

// splitURI splits an http:// or https:// URI after its path. Other schemes are not split because their keys may
// contain ? and #.
func splitURI(uri string) (head, tail string) {
	if r, ok := ParseHF(uri); ok {
		r.Rev = ""
		return r.String(), ""
	}
	if !isWeb(uri) {
		return uri, ""
	}
	// A password may contain ? and #, so the search starts after the user information.
	path := strings.Index(uri, "://") + 3
	if host := strings.IndexByte(uri[path:], '/'); host >= 0 && strings.Contains(uri[path:path+host], "@") {
		path += host
	}
	if i := strings.IndexAny(uri[path:], "?#"); i >= 0 {
		return uri[:path+i], uri[path+i:]
	}
	return uri, ""
}

// HF is a file or a whole repository on the Hugging Face hub.
type HF struct {
	Repo string // "org/name", "name", "datasets/org/name"
	Rev  string // "" means main
	File string // "" means the whole repository
}

// ParseHF parses hf://org/name/file@rev, hf://org/name@rev/file and hf://org/name@rev. A repository without an
// organisation is written hf://name@rev, or hf://name/file with a file name that ends in .safetensors or .json.
// %XX escapes of the revision are decoded once: feature%2Fx is the branch feature/x.
func ParseHF(uri string) (HF, bool) {
	scheme, rest, ok := strings.Cut(uri, "://")
	if !ok || !strings.EqualFold(scheme, "hf") {
		return HF{}, false
	}
	var r HF
	path, rev, hasRevision := strings.Cut(rest, "@")
	parts := strings.SplitN(path, "/", 2)
	names := 2
	if parts[0] == "datasets" || parts[0] == "spaces" {
		names = 3
	}
	all := strings.Split(path, "/")
	last := all[len(all)-1]
	if len(all) == 2 && names == 2 && (strings.HasSuffix(last, ".safetensors") || strings.HasSuffix(last, ".json")) {
		names = 1
	}
	names = min(names, len(all))
	r.Repo, r.File = strings.Join(all[:names], "/"), strings.Join(all[names:], "/")
	if !hasRevision {
		return r, true
	}
	// A revision that follows the file extends to the end. A revision that follows the repository ends at the
	// next slash, except in refs/pr/1 and refs/convert/parquet.
	r.Rev = rev
	if len(all) <= names {
		words := 1
		if strings.HasPrefix(rev, "refs/") {
			words = 3
		}
		p := strings.SplitN(rev, "/", words+1)
		if len(p) > words {
			r.File = p[words]
			r.Rev = strings.Join(p[:words], "/")
		}
	}
	if plain, err := url.PathUnescape(r.Rev); err == nil {
		r.Rev = plain
	}
	return r, true
}

// String returns the URI, which ends in the revision.
func (r HF) String() string {
	s := "hf://" + r.Repo
	if r.File != "" {
		s += "/" + r.File
	}
	if r.Rev == "" {
		return s
	}
	rev := strings.ReplaceAll(r.Rev, "%", "%25")
	if r.File == "" && !strings.HasPrefix(rev, "refs/") {
		rev = strings.ReplaceAll(rev, "/", "%2F") // an unescaped slash would begin the file name
	}
	return s + "@" + rev
}

// ObjectKey returns the same text for the same state of an object, in every process. store is the result of
// Options.StoreOf, and pin is the Pin of the object's Identity. Secrets in the URI do not count.
func ObjectKey(uri, store, pin string, size int64) string {
	hash := sha256.Sum256(fmt.Appendf(nil, "%s\x00%s\x00%s\x00%d", BareURI(uri), store, pin, size))
	return hex.EncodeToString(hash[:16])
}

// BareURI returns a URI without user, query and fragment.
func BareURI(uri string) string {
	path := Path(uri)
	scheme, rest, _ := strings.Cut(path, "://")
	host, name, _ := strings.Cut(rest, "/")
	if hf, ok := ParseHF(uri); ok {
		return hf.String()
	}
	return scheme + "://" + host[strings.LastIndexByte(host, '@')+1:] + "/" + name
}
