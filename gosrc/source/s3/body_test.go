package s3

import (
	"bytes"
	"context"
	"io"
	"testing"
	"testing/iotest"
	"time"
)

// A body can be read, sought and written as if its bytes were contiguous.
func TestBody(t *testing.T) {
	whole := bytes.Repeat([]byte("0123456789"), 60_000)
	for _, cuts := range [][]int{{}, {0, 0}, {1}, {3, 3, 100, 400_000}, {len(whole)}} {
		var all [][]byte
		from := 0
		for _, to := range append(cuts, len(whole)) {
			all = append(all, whole[from:to])
			from = to
		}
		w := &watch{limit: time.Hour}
		w.timer = time.NewTimer(time.Hour)
		b := bodyOf(context.WithValue(t.Context(), watch{}, w), all)
		if err := iotest.TestReader(b, whole); err != nil {
			t.Errorf("%v: %v", cuts, err)
		}
		for _, off := range []int64{0, 2, 5000, int64(len(whole))} {
			var out bytes.Buffer
			if _, err := b.Seek(off, io.SeekStart); err != nil {
				t.Fatal(err)
			}
			n, err := io.Copy(&out, b)
			if err != nil || n != int64(len(whole))-off || !bytes.Equal(out.Bytes(), whole[off:]) {
				t.Errorf("%v from %d: %d bytes, %v", cuts, off, n, err)
			}
		}
	}
}
