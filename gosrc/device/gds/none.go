//go:build !cgo

package gds

import "errors"

func library(string) (int, error) { return 0, errors.New("this build has no cgo") }
