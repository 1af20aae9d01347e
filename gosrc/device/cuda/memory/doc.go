// Package memory is a GPU's memory and pinned memory of the host: blocks that tensors share, blocks that are
// kept for the next load, and what the driver refused to free, which is tried again. Only package cuda, its
// parts and device/pinned use it.
//
// Everything is safe for concurrent use.
package memory
