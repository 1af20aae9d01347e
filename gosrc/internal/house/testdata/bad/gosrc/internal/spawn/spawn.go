// Package spawn is where go statements belong.
package spawn

func Go() { go Go() }
