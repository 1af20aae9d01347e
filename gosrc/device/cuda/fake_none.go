//go:build cgo && !owfakeauto

package cuda

func preset() {}
