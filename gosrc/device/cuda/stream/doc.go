// Package stream does a GPU's work on a caller's stream: copies, batches of bitstreams, encoding on the way to
// the host, and digests and deltas of weights that stay on the device. Only package cuda makes its types.
//
// Everything is safe for concurrent use unless it says otherwise. Kernels are safe for any bytes: a corrupt
// stream only gets its own error, and the context stays usable.
package stream

/*
#cgo CFLAGS: -std=gnu11 -Wall -Wextra -O2
*/
import "C"
