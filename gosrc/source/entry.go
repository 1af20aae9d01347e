package source

// This file defines the entries of a folder listing.

// An Entry is a file below a folder of a store, at any depth.
type Entry struct {
	Name string // relative to the folder, separated by slashes
	Size int64  // -1 if the store does not report it
}
