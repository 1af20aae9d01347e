// Package stream does a GPU's work on a caller's stream: copies, batches of bitstreams, encoding during copies to the
// host, and digests and deltas of weights that stay on the device. Only package cuda
// creates values of this package's types.
//
// All functions are safe for concurrent use unless documented otherwise. Kernels are safe for any bytes: a corrupt
// stream only sets its own error, and the context stays usable.
package stream

/*
#cgo CFLAGS: -std=gnu11 -Wall -Wextra -O2
*/
import "C"
