// Package health holds what the first panic changes. Only spawn and its test kit can import it, so no other package can
// reset an engine that a panic has stopped.
package health

import (
	"context"
	"sync/atomic"
)

// Panic is the error of the first panic, or nil.
var Panic atomic.Pointer[error]

// Engine is the context that spawn.Context returns, or nil before its first call.
var Engine atomic.Pointer[Life]

// Life is a context and its cancel function.
type Life struct {
	Ctx context.Context
	End context.CancelCauseFunc
}
