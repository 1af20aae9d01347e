//go:build !owfakeauto

package driver

// This build uses the real driver.

func useFakeDriver() {}
