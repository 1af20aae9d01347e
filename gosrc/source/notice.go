package source

// This file keeps what people should know of how sources were opened.

import (
	"slices"
	"sync"
)

// notices are those that no one has taken yet.
var notices struct {
	sync.Mutex
	texts []string
}

// maxNotices bounds those that no one takes.
const maxNotices = 64

// Notice adds a sentence, without secrets, to what the next call of Notices returns: a
// program shows it, once, as a warning.
func Notice(text string) {
	notices.Lock()
	defer notices.Unlock()
	if !slices.Contains(notices.texts, text) && len(notices.texts) < maxNotices {
		notices.texts = append(notices.texts, text)
	}
}

// Notices takes the sentences that have been added since the last call.
func Notices() []string {
	notices.Lock()
	defer notices.Unlock()
	texts := notices.texts
	notices.texts = nil
	return texts
}
