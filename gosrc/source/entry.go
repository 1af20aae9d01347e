package source

// This file defines the entries of folders in stores.

// An Entry is a file in a folder of a store, or in a folder below it.
type Entry struct {
	Name string // relative to the folder, with slashes
	Size int64  // -1 if the store does not say
}
