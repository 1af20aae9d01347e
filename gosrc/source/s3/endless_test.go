package s3

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

// A store with endless listings or endless responses gives a typed error.
func TestEndless(t *testing.T) {
	empty := `<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>more</NextContinuationToken></ListBucketResult>`
	spaces := bytes.Repeat([]byte(" "), 1<<20)
	pour := func(w http.ResponseWriter, begin string) {
		_, _ = io.WriteString(w, begin)
		for range 2 * maxAnswer / len(spaces) {
			if _, err := w.Write(spaces); err != nil {
				return
			}
		}
	}
	for name, q := range map[string]struct {
		class error
		says  func(w http.ResponseWriter)
	}{
		"pages": {errs.ErrNotSupported, func(w http.ResponseWriter) { _, _ = io.WriteString(w, empty) }},
		"list":  {errs.ErrFormat, func(w http.ResponseWriter) { pour(w, "<ListBucketResult>") }},
		"error": {errs.ErrFormat, func(w http.ResponseWriter) { w.WriteHeader(http.StatusBadRequest); pour(w, "<Error>") }},
	} {
		h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { q.says(w) }))
		opt := source.Options{Storage: map[string]string{"endpoint_url": h.URL, "key": "k", "secret": "s", "retries": "0"}}
		_, err := Walk(t.Context(), "s3://bucket/folder/", opt, false)
		if !errors.Is(err, q.class) {
			t.Errorf("%s: %v", name, err)
		}
		if name == "error" {
			if _, err := get("s3://bucket/object", opt); !errors.Is(err, errs.ErrFormat) {
				t.Errorf("%s for an object: %v", name, err)
			}
		}
		h.Close()
	}
}
