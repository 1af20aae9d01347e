package source

// This file collects warnings about how sources were opened.

import (
	"slices"
	"sync"
)

// notices are the warnings that Notices has not returned yet.
var notices struct {
	sync.Mutex
	texts []string
}

// maxNotices is the largest number of stored warnings.
const maxNotices = 64

// Notice stores a warning until the next call of Notices. The text must not contain secrets. The caller of
// Notices shows it once.
func Notice(text string) {
	notices.Lock()
	defer notices.Unlock()
	if !slices.Contains(notices.texts, text) && len(notices.texts) < maxNotices {
		notices.texts = append(notices.texts, text)
	}
}

// Notices returns the warnings added since the last call.
func Notices() []string {
	notices.Lock()
	defer notices.Unlock()
	texts := notices.texts
	notices.texts = nil
	return texts
}
