//go:build !owfakeauto

package driver

// The build loads the real driver.

func useFakeDriver() {}
