//go:build !goexperiment.simd || !amd64

package codec

import "hash/crc32"

func sum(p []byte) uint32 { return crc32.Checksum(p, castagnoli) }
