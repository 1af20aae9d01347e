package errs

// This file adds places to errors.

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
