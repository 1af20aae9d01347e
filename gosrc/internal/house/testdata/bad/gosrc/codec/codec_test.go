package codec

// Tests may do what the engine may not.
func tested() { go tested() }
