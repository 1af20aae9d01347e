// Package memory manages a GPU's memory and pinned host memory: blocks that tensors share, and blocks that are
// kept for the next load. It retries frees that the driver has refused. Only package cuda, its parts and
// device/pinned use it.
//
// Everything is safe for concurrent use.
package memory
