package source

// This file has what folders of stores list.

// An Entry is a file of a folder in a store, or of a folder below it.
type Entry struct {
	Name string // below the folder, with slashes
	Size int64  // -1: the store does not say
}
