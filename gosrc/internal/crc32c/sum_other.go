//go:build !goexperiment.simd || !amd64 || scalar

package crc32c

// This file computes CRC-32C without AVX-512.

import "hash/crc32"

func sumBytes(p []byte) uint32 { return crc32.Checksum(p, castagnoli) }
