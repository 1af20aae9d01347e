//go:build !cgo

package gds

import (
	"errors"
	"unsafe"

	"github.com/overwire/overwire/gosrc/fault"
)

var errNone = errors.New("this build has no cgo")

func library(string) (int, error) { return 0, errNone }

func openDriver(string) error { return errNone }

// A File is read straight into GPUs' memory.
type File struct{}

// Open makes a file ready.
func Open(int) (*File, error) { return nil, fault.New(fault.ErrNotSupported, "%v", errNone) }

// ReadInto reads some bytes.
func (f *File) ReadInto(unsafe.Pointer, int64, int64, int64) (int64, error) {
	return 0, fault.New(fault.ErrNotSupported, "%v", errNone)
}

// Close ends it.
func (f *File) Close() {}

// Register tells libcufile of memory that will be read to.
func Register(unsafe.Pointer, int64) (undo func()) { return func() {} }
