// Package util is a second drawer.
package util

type Chunk int
