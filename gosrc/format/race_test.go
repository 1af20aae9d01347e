//go:build race

package format

// thin: the exhaustive loops take a sample under the race detector, which
// makes them 30 times slower and has nothing to find in them.
const thin = true
