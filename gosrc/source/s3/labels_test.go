package s3

import (
	"bytes"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

// An object with a Content-Encoding is refused after one request, and the error names the encoding. Labels that
// do not change the bytes are ignored.
func TestLabels(t *testing.T) {
	t.Parallel()
	data := random(source.HeadBytes + 100)
	for label, refused := range map[string]string{"aws-chunked": "", "Identity, AWS-chunked,": "", "gzip": `"gzip"`,
		"aws-chunked,zstd": `"zstd"`} {
		var requests atomic.Int64
		h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			requests.Add(1)
			w.Header()["Content-Encoding"] = strings.SplitAfter(label, ",")
			w.Header().Set("ETag", `"x"`)
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(data))
		}))
		back, err := get("s3://models/m", source.Options{Storage: map[string]string{"endpoint_url": h.URL,
			"anon": "true"}})
		h.Close()
		switch {
		case refused == "" && (err != nil || !bytes.Equal(back, data)):
			t.Errorf("%s: %v", label, err)
		case refused != "" && (!errors.Is(err, errs.ErrNotSupported) || !strings.Contains(err.Error(), refused) ||
			requests.Load() != 1):
			t.Errorf("%s: %v after %d requests", label, err, requests.Load())
		}
	}
}
