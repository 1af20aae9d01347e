//go:build nostores

package open

var stores map[string]store
