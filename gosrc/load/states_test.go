package load

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// The digest of samples changes if any tensor of a plain file has other bytes, also if the file's size and times are
// the same. It does not depend on the time of modification.
func TestSamples(t *testing.T) {
	shapes := [][]int64{{3, 5}, {40_000_000}, {7}, {130, 10_001}, {0}, {1}}
	path, bytes := write(t, "a", shapes...)
	digest := func() string {
		m := opened(t, Spec{URIs: []string{path}})
		sum, err := sampleDigest(t.Context(), m.held, 0, m.srcs[0], &State{Size: m.held.Sources[0].Size})
		if err != nil {
			t.Fatal(err)
		}
		return sum
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

// A write to one element of a plain file changes the digest of samples, also if it is not in a sample and the time of
// modification is restored. Reading the file and a symbolic link to it do not change the digest.
func TestSamplesShowWrites(t *testing.T) {
	path, _ := write(t, "a", []int64{40_000_000})
	states := func(path string) State {
		states, err := opened(t, Spec{URIs: []string{path}}).FileStates(t.Context(), true)
		if err != nil || len(states) != 1 || states[0].Sample == "" {
			t.Fatal(states, err)
		}
		return states[0]
	}
	before := states(path)
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	if states(path) != before || states(link).Sample != before.Sample {
		t.Error("a file that was only read has another digest")
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 1)
	if _, err = f.ReadAt(b, before.Size-1); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 1
	for now := before; now.Changed == before.Changed; now = states(path) { // until the file system's clock advances
		if _, err := f.WriteAt(b, before.Size-1); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, time.Unix(0, before.Modified), time.Unix(0, before.Modified)); err != nil {
			t.Fatal(err)
		}
	}
	if now := states(path); now.Modified != before.Modified || now.Size != before.Size || now.Sample == before.Sample {
		t.Errorf("before %+v, now %+v", before, now)
	}
}
