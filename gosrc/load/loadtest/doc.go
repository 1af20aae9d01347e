// Package loadtest is what tests of loads to GPUs share: models, loads of them, and their bytes
// read back. On a machine without a GPU they are skipped; under the tag owfake they run on the
// fake driver.
package loadtest
