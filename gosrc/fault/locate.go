package fault

// Locate says where err happened, as far as err does not say so itself: the file,
// the tensor ("": none) and the chunk (-1: none). nil stays nil.
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
