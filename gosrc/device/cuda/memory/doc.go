// Package memory manages a GPU's memory and pinned host memory. Tensors share blocks, and free blocks are cached for
// the next load. Frees that the driver rejects are retried. Only package cuda, its parts and device/pinned use this
// package.
//
// All functions are safe for concurrent use.
package memory
