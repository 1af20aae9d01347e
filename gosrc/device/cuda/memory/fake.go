//go:build owfake

package memory

// KeepBytes is the size of the permanent cache, for tests.
const KeepBytes = keepBytes

// FakeRegisterAlignment makes RegisterAlignment smaller, for tests, until end is called.
func FakeRegisterAlignment(n int64) (end func()) {
	usual := registerAlignment
	registerAlignment = n
	return func() { registerAlignment = usual }
}

// FakeWithoutReaper stops the reaper until end is called, so that a test can run its steps.
func FakeWithoutReaper(m *Memory) (end func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.reaping = true
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.reaping = false
		m.startReaper()
	}
}

// FakeFreeSurplus runs the reaper's step that frees blocks beyond the permanent cache.
func FakeFreeSurplus(m *Memory) { m.freeOldSurplus() }

// FakeForgetStreams removes the streams of NoteStream, so that a test can free them.
func FakeForgetStreams(m *Memory) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.users = nil
}

// CountBlocks returns how many blocks are live, how many are cached, and how many frees are deferred.
func CountBlocks(m *Memory) (live, kept, deferred int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.live, len(m.kept.blocks), len(m.deferred)
}
