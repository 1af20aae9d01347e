//go:build !race

package format

const thin = false
