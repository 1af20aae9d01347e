//go:build !cgo

package driver

// This file stands in for the driver in builds without cgo: there is none.

import "github.com/overwire/overwire/gosrc/errs"

var errNone = errs.New(errs.ErrNotSupported, "CUDA: this build has no cgo")

func Available() error            { return errNone }
func Info() ([]DeviceInfo, error) { return nil, errNone }
func ThreadMode(int) int          { return -1 }
func DeviceOf(uint64) int         { return -1 }
