//go:build owfake

package memory

// KeepBytes is how many bytes are kept for good, for tests.
const KeepBytes = keepBytes

// FakeRegisterAlignment makes RegisterAlignment smaller for tests, until end.
func FakeRegisterAlignment(n int64) (end func()) {
	usual := registerAlignment
	registerAlignment = n
	return func() { registerAlignment = usual }
}

// FakeWithoutReaper stops the reaper until end, so that a test can take its steps.
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

// FakeFreeSurplus takes the reaper's step that frees blocks beyond those kept for good.
func FakeFreeSurplus(m *Memory) { m.freeOldSurplus() }

// FakeForgetStreams forgets the streams of NoteStream, so that a test can free them.
func FakeForgetStreams(m *Memory) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.users = nil
}

// CountBlocks returns how many blocks are not yet freed, how many are kept, and how many frees are deferred.
func CountBlocks(m *Memory) (live, kept, deferred int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.live, len(m.kept.blocks), len(m.deferred)
}
