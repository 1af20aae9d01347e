// Package spawntest lets tests wait for goroutines, and continue after a panic that they have provoked.
package spawntest

import (
	"slices"
	"time"

	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/internal/spawn/internal/health"
)

// Left waits up to a minute until only the named goroutines run, and returns the names of the others. It is the
// leak test of every package. It waits because a goroutine is counted for a moment after it has released
// callers that wait for its result.
func Left(but ...string) []string {
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		running := slices.DeleteFunc(spawn.Names(), func(n string) bool { return slices.Contains(but, n) })
		if len(running) == 0 || time.Now().After(end) {
			return running
		}
	}
}

// Heal resets the engine after a panic.
func Heal() {
	health.Panic.Store(nil)
	health.Engine.Store(nil)
}
