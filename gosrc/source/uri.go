package source

import (
	"net/url"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
)

// This file parses URIs, so that formats can find the shards next to an index without knowing any store.

// A Location is a parsed path or URI.
type Location struct {
	URI    string // as the user wrote it
	Scheme string // in lower case; "" for a path
	Path   string // local: the file's path on this host; remote: see Path
	Remote bool
	// For a remote URI: its last name, as Beside takes it; whether it names a folder; the URI of that folder.
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

// Scheme is the scheme of a URI in lower case, or "" for a local path.
func Scheme(uri string) string {
	s, _, ok := strings.Cut(uri, "://")
	if !ok || strings.ContainsAny(s, "/\\.") {
		return ""
	}
	return strings.ToLower(s)
}

// WithoutScheme returns the path of a valid file:// URI, and anything else unchanged.
func WithoutScheme(uri string) string {
	if path, ok := Local(uri); ok {
		return path
	}
	return uri
}

// Remote reports whether a name is a URI of anything but a local file.
func Remote(uri string) bool {
	s := Scheme(uri)
	return s != "" && s != "file"
}

// Local is the path of a local file, which a path or a file:// URI names; ok is false
// for any other URI.
func Local(uri string) (path string, ok bool) {
	switch Scheme(uri) {
	case "":
		return uri, true
	case "file":
		return pathOfFile(uri)
	}
	return "", false
}

// FilePath is the path of a file:// URI on this host, with the escapes %XX replaced by their bytes. A bare ? or #
// is refused: some readers end the path there, others treat it as part of the name.
func FilePath(uri string) (string, error) {
	path, ok := pathOfFile(uri)
	if !ok {
		return "", errs.In("open", uri, errs.New(errs.ErrArgument,
			"not the URI of a local file (? is written %%3F there, # %%23)"))
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

// Path is the part of a URI that ends in the object's name. It has no query, no fragment, and for hf:// no
// revision.
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

// Directory is the URI of a remote folder. It ends in a slash if its scheme cannot mark a folder otherwise.
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

// Below is the URI of a folder below a remote one; for "" it is dir itself.
func Below(dir, name string) string {
	if name == "" {
		return dir
	}
	return Beside(dir, name+"/")
}

// isBucket reports whether an S3 URI names a bucket, without a slash after it.
func isBucket(uri string) bool { return Scheme(uri) == "s3" && strings.Count(uri, "/") == 2 }

// Name is the last name of a URI, as Beside takes it.
func Name(uri string) string {
	head := Path(uri)
	name := head[strings.LastIndexByte(head, '/')+1:]
	if plain, err := url.PathUnescape(name); err == nil && isWeb(uri) && !strings.Contains(plain, "/") {
		return plain
	}
	return name
}

// Beside is the URI of another name in the same folder as uri, or in uri itself if that is a folder. The name may
// have slashes. A query stays, since signatures of a whole folder are in it.
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

// EscapeGlob escapes a path so that filepath.Glob does not read it as a pattern.
func EscapeGlob(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}

func isWeb(uri string) bool { return Scheme(uri) == "http" || Scheme(uri) == "https" }

// splitURI cuts off what follows the path of http:// and https://. Keys of other stores may contain ? and #.
func splitURI(uri string) (head, tail string) {
	if r, ok := ParseHF(uri); ok {
		r.Rev = ""
		return r.String(), ""
	}
	if !isWeb(uri) {
		return uri, ""
	}
	// A user's password may contain any of these characters; it ends before the host.
	path := strings.Index(uri, "://") + 3
	if host := strings.IndexByte(uri[path:], '/'); host >= 0 && strings.Contains(uri[path:path+host], "@") {
		path += host
	}
	if i := strings.IndexAny(uri[path:], "?#"); i >= 0 {
		return uri[:path+i], uri[path+i:]
	}
	return uri, ""
}

// HF is a file, or a whole repository, of the Hugging Face hub.
type HF struct {
	Repo string // "org/name", "name", "datasets/org/name"
	Rev  string // "" is main
	File string // "" is the repository
}

// ParseHF reads hf://org/name/file@rev, hf://org/name@rev/file and
// hf://org/name@rev. A repository without an organisation is written
// hf://name@rev, or with a file that ends in .safetensors or .json. Escapes %XX of the
// revision are replaced by their bytes, once: feature%2Fx is the branch feature/x.
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
	// After the file, everything is the revision. After the repository, the revision ends at the next slash,
	// except in refs/pr/1 and refs/convert/parquet.
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

// String is the URI, with the revision at its end.
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
		rev = strings.ReplaceAll(rev, "/", "%2F") // or the rest would be read as the file
	}
	return s + "@" + rev
}
