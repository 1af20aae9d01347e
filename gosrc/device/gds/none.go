//go:build !cgo

package gds

// This file stands in for GPUDirect Storage in builds without cgo.

import (
	"errors"
	"unsafe"

	"github.com/overwire/overwire/gosrc/errs"
)

var errNone = errors.New("this build has no cgo")

func library(string) (int, error) { return 0, errNone }

func openDriver() error { return errNone }

// A File is read straight into GPU memory.
type File struct{}

// Open prepares a file.
func Open(int) (*File, error) { return nil, errs.New(errs.ErrNotSupported, "%v", errNone) }

// ReadInto reads some bytes.
func (f *File) ReadInto(unsafe.Pointer, int64, int64, int64) (int64, error) {
	return 0, errs.New(errs.ErrNotSupported, "%v", errNone)
}

// Close ends it.
func (f *File) Close() {}

// Register registers memory with libcufile.
func Register(unsafe.Pointer, int64) (undo func()) { return func() {} }
