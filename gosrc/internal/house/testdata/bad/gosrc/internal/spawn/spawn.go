// Package spawn is where go statements belong.
package spawn

func Heal() { go Heal() }
