package binding

// This file reads tensors that Python describes in columns.

import (
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

// columns describes tensors. Their addresses are among the verb's numbers.
type columns struct {
	Names  []string  `json:"names"`
	DTypes []string  `json:"dtypes"`
	Shapes [][]int64 `json:"shapes"`
}

// types returns the dtypes of the tensors. It checks that there are `each` numbers per tensor.
func (c *columns) types(numbers, each int) ([]tensor.DType, error) {
	if len(c.DTypes) != len(c.Names) || len(c.Shapes) != len(c.Names) || numbers != each*len(c.Names) {
		return nil, errs.New(errs.ErrArgument, "%d names, %d dtypes, %d shapes do not match %d numbers", len(c.Names),
			len(c.DTypes), len(c.Shapes), numbers)
	}
	types := make([]tensor.DType, len(c.Names))
	for i, name := range c.Names {
		d, ok := tensor.ParseDType(c.DTypes[i])
		if !ok {
			return nil, errs.New(errs.ErrArgument, "tensor %q: unknown dtype %q", name, c.DTypes[i])
		}
		types[i] = d
	}
	return types, nil
}

// named calls types and also refuses names that a header cannot contain.
func (c *columns) named(numbers, each int) ([]tensor.DType, error) {
	types, err := c.types(numbers, each)
	if i := slices.IndexFunc(c.Names, func(name string) bool {
		return strings.ContainsRune(name, 0)
	}); err == nil && i >= 0 {
		err = errs.New(errs.ErrArgument, "tensor %q: the name contains a NUL character", c.Names[i])
	}
	return types, err
}

// dataAt returns the caller's memory at an address.
func dataAt(addr uint64, n int64) ([]byte, error) {
	if n < 0 || n > 0 && addr == 0 {
		return nil, errs.New(errs.ErrArgument, "invalid memory: %d bytes at address %#x", n, addr)
	}
	return device.Bytes(addr, n), nil
}
