package s3

import (
	"bytes"
	"errors"
	"maps"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

// If a store sends neither an ETag nor a date, or has no ranges, an object is read by one request. The request
// is repeated if it breaks.
func TestOneRequest(t *testing.T) {
	t.Parallel()
	data := random(3*source.HeadBytes + 17)
	other := bytes.Clone(data)
	other[5]++
	for what, c := range map[string]struct {
		data         []byte
		ranges, etag bool
		breaks       int64  // number of whole responses that end early
		then         []byte // the content of later responses
		class        error
	}{
		"ranges":               {data, true, false, 0, data, nil},
		"no ranges":            {data, false, false, 0, data, nil},
		"no ranges, an ETag":   {data, false, true, 0, data, nil},
		"small":                {data[:100], true, false, 0, data[:100], nil},
		"empty":                {nil, true, false, 0, nil, nil},
		"breaks":               {data, true, false, 2, data, nil},
		"changes after breaks": {data, true, false, 1, other, errs.ErrCorrupt},
		"breaks too often":     {data, true, false, 99, data, errs.ErrIO},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			var wholes atomic.Int64
			h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				now := c.data
				if c.etag {
					w.Header().Set("ETag", `"x"`)
				}
				if c.ranges && r.Header.Get("Range") != "" {
					http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(now))
					return
				}
				if r.Header.Get("Range") == "" && r.Method == http.MethodGet {
					if n := wholes.Add(1); n <= c.breaks {
						w.Header().Set("Content-Length", strconv.Itoa(len(now)))
						_, _ = w.Write(now[:len(now)/2])
						panic(http.ErrAbortHandler)
					}
					now = c.then
				}
				w.Header().Set("Content-Length", strconv.Itoa(len(now)))
				_, _ = w.Write(now)
			}))
			defer h.Close()
			back, err := get("s3://models/m", source.Options{Storage: map[string]string{"endpoint_url": h.URL, "anon": "true", "retries": "3"}})
			switch {
			case c.class == nil && (err != nil || !bytes.Equal(back, c.data)):
				t.Errorf("%d bytes, %v", len(back), err)
			case c.class != nil && (!errors.Is(err, c.class) || !strings.Contains(err.Error(), "s3://models/m")):
				t.Error(err)
			}
		})
	}
}

// If a store ignores conditions, a replacement of the same size is detected by the ETag or, without one, by the
// date. A response without either is also an error.
func TestConditionsThatAreIgnored(t *testing.T) {
	t.Parallel()
	data := random(3 * source.HeadBytes)
	for what, c := range map[string]struct {
		first, later http.Header
		class        error
	}{
		"same ETag":   {http.Header{"Etag": {`"a"`}}, http.Header{"Etag": {`"a"`}}, nil},
		"other ETag":  {http.Header{"Etag": {`"a"`}}, http.Header{"Etag": {`"b"`}}, errs.ErrCorrupt},
		"no ETag now": {http.Header{"Etag": {`"a"`}}, nil, errs.ErrCorrupt},
		"same date":   {http.Header{"Last-Modified": {dates[0]}}, http.Header{"Last-Modified": {dates[0]}}, nil},
		"other date": {http.Header{"Last-Modified": {dates[0]}}, http.Header{"Last-Modified": {dates[1]}},
			errs.ErrCorrupt},
		"no date now": {http.Header{"Last-Modified": {dates[0]}}, nil, errs.ErrCorrupt},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			var answers atomic.Int64
			h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				headers := c.first
				if answers.Add(1) > 1 {
					headers = c.later
				}
				maps.Copy(w.Header(), headers)
				for _, name := range []string{"If-Match", "If-Unmodified-Since"} {
					r.Header.Del(name)
				}
				http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(data))
			}))
			defer h.Close()
			back, err := get("s3://models/m", source.Options{Storage: map[string]string{"endpoint_url": h.URL,
				"anon": "true", "retries": "1"}})
			if !errors.Is(err, c.class) || c.class == nil && !bytes.Equal(back, data) {
				t.Errorf("%d bytes, %v", len(back), err)
			}
		})
	}
}

var dates = [2]string{"Mon, 02 Nov 2026 10:00:00 GMT", "Mon, 02 Nov 2026 10:00:01 GMT"}
