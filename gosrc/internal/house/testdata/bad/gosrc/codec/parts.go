package codec

// This file has more of the types.

type nested struct{ wide }

func (Chunk) one() {}
