package route

import "testing"

// For any Content-Range, the result is a range within the total, or none.
func FuzzContentRange(f *testing.F) {
	for _, s := range []string{"bytes 0-9/10", "bytes */10", "bytes 5-9/*", "bytes 9-5/10", "bytes 0-9/9",
		"bytes 0-18446744073709551615/1", "items 0-1/2", "bytes +0-1/2", "", "bytes -/-"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		from, to, total, ok := ContentRange(s)
		if ok && (from < 0 || total < -1 || to != -1 && (from > to || total >= 0 && to >= total) ||
			to == -1 && from != 0) {
			t.Errorf("%q: %d-%d of %d", s, from, to, total)
		}
	})
}
