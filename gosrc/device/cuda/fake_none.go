//go:build cgo && !owfakeauto

package cuda

// This file says that the build has no fake driver.

func useFakeDriver() {}
