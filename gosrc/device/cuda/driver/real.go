//go:build !owfakeauto

package driver

// Builds with the real driver.

func useFakeDriver() {}
