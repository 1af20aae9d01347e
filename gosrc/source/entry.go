package source

// This file names folders of stores, and what they list.

import "strings"

// An Entry is a file of a folder in a store, or of a folder below it.
type Entry struct {
	Name string // below the folder, with slashes
	Size int64  // -1: the store does not say
}

// Directory is the URI of a remote folder, which ends in a slash where its scheme has no
// other sign of one.
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

// Below is the URI of a folder below a remote one; "" is that one itself.
func Below(dir, name string) string {
	if name == "" {
		return dir
	}
	return Beside(dir, name+"/")
}

// isBucket reports whether a URI of S3 names a bucket, without a slash behind it.
func isBucket(uri string) bool { return Scheme(uri) == "s3" && strings.Count(uri, "/") == 2 }
