//go:build race

package format

// thin makes exhaustive loops take a sample. Under the race detector they are 30 times slower and cannot find races.
const thin = true
