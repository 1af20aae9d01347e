//go:build race

package format

// thin: under the race detector the exhaustive loops take a sample, since it makes them 30 times slower and cannot find
// anything in them.
const thin = true
