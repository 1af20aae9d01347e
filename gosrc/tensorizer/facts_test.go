package tensorizer

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/overwire/overwire/gosrc/source"
	disk "github.com/overwire/overwire/gosrc/source/file"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

// Sources that check or decrypt a file fulfil the contract of source.Source. Their bytes are only available through
// ReadAt, and their identity is the file's.
func TestFacts(t *testing.T) {
	opened := func(t *testing.T, data []byte) source.Source {
		path := filepath.Join(t.TempDir(), "x")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := disk.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	is := sourcetest.Is{Known: true}
	t.Run("checked", func(t *testing.T) {
		sourcetest.Suite(t, is, func(t *testing.T, data []byte) source.Source {
			return &checked{Source: opened(t,
				data)}
		})
	})
	t.Run("sealed", func(t *testing.T) {
		sourcetest.Suite(t, is, func(t *testing.T, data []byte) source.Source {
			return &sealed{Source: opened(t, data), size: int64(len(data))}
		})
	})
	t.Run("coding", func(t *testing.T) {
		c := &checked{Source: &sealed{Source: opened(t, make([]byte, 100)), size: 100, zeros: 5,
			spans: []span{{off: 10, end: 20}}}}
		defer c.Close()
		coding := c.Facts().Coding
		for off, want := range map[int64]string{0: "plain", 10: "encrypted", 19: "encrypted", 20: "plain",
			100: "zeros"} {
			if got := coding(off); got != want {
				t.Errorf("at %d: %s, want %s", off, got, want)
			}
		}
	})
}
