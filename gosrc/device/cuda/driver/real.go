//go:build !owfakeauto

package driver

// This file says that the build loads the real driver.

func useFakeDriver() {}
