package errs

// This file adds places to errors.

import "errors"

// In is Locate for an error of a whole file.
func In(verb, source string, err error) error { return Locate(verb, source, "", -1, err) }

// Place adds the file, the tensor ("": none) and the offset (-1: none) to err, unless
// err, or one that it wraps, has a place. It returns nil for nil.
func Place(verb, source, tensor string, off int64, err error) error {
	var at *At
	if err == nil || errors.As(err, &at) {
		return err
	}
	return &At{Verb: verb, Source: source, Tensor: tensor, Chunk: -1, Offset: off, Err: err}
}

// Locate adds the file, the tensor ("": none) and the chunk (-1: none) to err, as far
// as err has none of its own. It returns nil for nil.
func Locate(verb, source, tensor string, chunk int64, err error) error {
	if err == nil {
		return nil
	}
	if at, ok := err.(*At); ok {
		c := *at
		if c.Tensor == "" {
			c.Tensor = tensor
		}
		if c.Chunk < 0 {
			c.Chunk = chunk
		}
		if c.Source == "" {
			c.Source = source
		}
		return &c
	}
	return &At{Verb: verb, Source: source, Tensor: tensor, Chunk: chunk, Offset: -1, Err: err}
}
