// Package stream is what a GPU does on a caller's stream: copies, batches of bitstreams, encoding on the way
// to the host, digests and deltas of weights that stay there. Only package cuda makes its types.
//
// Everything is safe for concurrent use unless it says otherwise. Kernels are safe for any bytes: a corrupt
// stream is its own error, and the context stays usable.
package stream

/*
#cgo CFLAGS: -std=gnu11 -Wall -Wextra -O2
*/
import "C"
