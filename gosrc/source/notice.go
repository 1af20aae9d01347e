package source

// This file collects warnings about how sources were opened.

import (
	"slices"
	"sync"
)

// notices are the warnings that no one has taken yet.
var notices struct {
	sync.Mutex
	texts []string
}

// maxNotices bounds them.
const maxNotices = 64

// Notice adds a sentence, without secrets, that the next call of Notices returns. A program shows it once, as a
// warning.
func Notice(text string) {
	notices.Lock()
	defer notices.Unlock()
	if !slices.Contains(notices.texts, text) && len(notices.texts) < maxNotices {
		notices.texts = append(notices.texts, text)
	}
}

// Notices returns the sentences that were added since the last call.
func Notices() []string {
	notices.Lock()
	defer notices.Unlock()
	texts := notices.texts
	notices.texts = nil
	return texts
}
