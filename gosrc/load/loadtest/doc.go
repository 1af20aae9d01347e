// Package loadtest helps to test loads to GPUs: it makes models, loads them, and reads their bytes back. Without a
// GPU, these tests are skipped. With the build tag owfake they run on the fake driver.
package loadtest
