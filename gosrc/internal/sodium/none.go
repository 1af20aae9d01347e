//go:build !cgo

package sodium

// This file stands in where cgo is off: there is no library then.

// Version returns "".
func Version() string { return "" }

// Seal must not be called without a Version.
func Seal([]byte, *[24]byte, *[32]byte) [16]byte { panic("sodium: no library") }

// Open must not be called without a Version.
func Open([]byte, *[16]byte, *[24]byte, *[32]byte) bool { panic("sodium: no library") }
