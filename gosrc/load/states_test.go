package load

import (
	"os"
	"testing"
	"time"
)

// The digest of samples changes if any tensor of a plain file has other bytes, also if the file's size and times are
// the same. It does not depend on the file's times.
func TestSamples(t *testing.T) {
	shapes := [][]int64{{3, 5}, {40_000_000}, {7}, {130, 10_001}, {0}, {1}}
	path, bytes := write(t, "a", shapes...)
	digest := func() string {
		states, err := opened(t, Spec{URIs: []string{path}}).FileStates(t.Context(), true)
		if err != nil || len(states) != 1 || states[0].Sample == "" {
			t.Fatal(states, err)
		}
		return states[0].Sample
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	off := len(whole)
	for _, b := range bytes {
		off -= len(b)
	}
	before := digest()
	for i, b := range bytes {
		for k := range b {
			whole[off+k] ^= 1
		}
		at := time.Unix(1_000_000*int64(i), 0)
		if err := os.WriteFile(path, whole, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, at, at); err != nil {
			t.Fatal(err)
		}
		if now := digest(); (now == before) != (len(b) == 0) {
			t.Errorf("tensor %d has other bytes, and the digest is equal: %v", i, now == before)
		}
		for k := range b {
			whole[off+k] ^= 1
		}
		off += len(b)
	}
	if err := os.WriteFile(path, whole, 0o600); err != nil || digest() != before {
		t.Errorf("the same bytes have another digest: %v", err)
	}
}
