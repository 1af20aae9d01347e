// Package near suggests the most similar valid name for a misspelled one.
package near

import "strings"

// most is the longest name that is compared, because the cost grows with the square of the length.
const most = 128

// Best returns the name most similar to word, or "" if none is similar. A name is similar if at most a third of its
// bytes differ, ignoring case. The first one wins if several are equally similar.
func Best(word string, names []string) string {
	best, least := "", 0
	if len(word) > most {
		return ""
	}
	for _, name := range names {
		if len(name) > most || name == word {
			continue
		}
		n := editDistance(strings.ToLower(word), strings.ToLower(name))
		if n*3 <= len(name) && (best == "" || n < least) {
			best, least = name, n
		}
	}
	return best
}

// editDistance counts the bytes to insert, remove or replace to turn a into b.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			wrong := 1
			if a[i] == b[j] {
				wrong = 0
			}
			diagonal, row[j+1] = row[j+1], min(row[j+1]+1, row[j]+1, diagonal+wrong)
		}
	}
	return row[len(b)]
}
