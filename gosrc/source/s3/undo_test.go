//go:build !nostores

package s3

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

// beginningOf returns the response to the beginning of an upload.
func beginningOf(id string) string {
	return "<InitiateMultipartUploadResult><UploadId>" + id + "</UploadId></InitiateMultipartUploadResult>"
}

// published returns a draft that was just published.
func published(t *testing.T, opt source.Options, uri string, data []byte) source.Draft {
	t.Helper()
	d, err := Create(bg, uri, opt, int64(len(data)))
	if err == nil {
		err = errors.Join(d.Write(data, 0), d.Finish(int64(len(data))), d.Publish())
	}
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// UndoPublish removes an object of one or of several parts. An object of another writer stays, even if it has the same
// bytes and therefore the same ETag, and even if it is written after the identity was compared.
func TestUndo(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartS3(t, false)
	var late atomic.Pointer[func()]
	front := fronted(t, s, func(r *http.Request) {
		if write := late.Load(); r.Method == http.MethodDelete && write != nil {
			(*write)()
		}
	}, nil)
	opt, uri := with(s, "endpoint_url", front), "s3://models/undone"
	for _, data := range [][]byte{[]byte("small"), random(minPart + 1)} {
		d := published(t, opt, uri, data)
		for range 2 {
			if err := d.UndoPublish(); err != nil {
				t.Error(err)
			}
			if _, err := get(uri, opt); !errors.Is(err, errs.ErrNotFound) {
				t.Errorf("%d bytes: %v", len(data), err)
			}
		}
		for what, other := range map[string][]byte{"equal": data, "different": []byte("theirs")} {
			d = published(t, opt, uri, data)
			published(t, opt, uri, other)
			if err := d.UndoPublish(); err != nil {
				t.Error(err)
			}
			if b, err := get(uri, opt); string(b) != string(other) {
				t.Errorf("%d bytes, %s: %d bytes remain: %v", len(data), what, len(b), err)
			}
		}
		d = published(t, opt, uri, data)
		write := func() { put(t, with(s), uri, []byte("theirs")) }
		late.Store(&write)
		if err := d.UndoPublish(); err != nil {
			t.Error(err)
		}
		late.Store(nil)
		if b, err := get(uri, opt); string(b) != "theirs" {
			t.Errorf("%d bytes, written last: %d bytes remain: %v", len(data), len(b), err)
		}
	}
}

// If a store does not say whose object it is, the object stays and UndoPublish returns an error. A store that does not
// support conditions is asked without one.
func TestUndoInDoubt(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartS3(t, false)
	for what, c := range map[string]struct {
		change  func(r *http.Response)
		removes bool
		class   error
	}{
		"no metadata": {func(r *http.Response) {
			for name := range r.Header {
				if strings.HasPrefix(name, "X-Amz-Meta-") {
					r.Header.Del(name)
				}
			}
		}, false, errs.ErrNotSupported},
		"denied": {func(r *http.Response) {
			if r.Request.Method == http.MethodHead {
				r.StatusCode = http.StatusForbidden
			}
		}, false, errs.ErrPermission},
		"no conditions": {nil, true, nil},
	} {
		var isRefused atomic.Bool
		h := forwarder(s, func(r *http.Response) error {
			if c.change != nil {
				c.change(r)
			}
			return nil
		})
		front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if what == "no conditions" && r.Method == http.MethodDelete && r.Header.Get("If-Match") != "" {
				isRefused.Store(true)
				refuse(w, http.StatusNotImplemented, "NotImplemented")
				return
			}
			h.ServeHTTP(w, r)
		}))
		t.Cleanup(front.Close)
		uri := "s3://models/doubt " + what
		d := published(t, with(s, "endpoint_url", front.URL), uri, []byte("ours"))
		if err := d.UndoPublish(); c.class == nil && err != nil || c.class != nil && (!errors.Is(err, c.class) ||
			!strings.Contains(err.Error(), uri)) {
			t.Errorf("%s: %v", what, err)
		}
		if _, err := get(uri, with(s)); errors.Is(err, errs.ErrNotFound) != c.removes {
			t.Errorf("%s: %v", what, err)
		}
		if isRefused.Load() != c.removes {
			t.Errorf("%s: asked with a condition: %v", what, isRefused.Load())
		}
	}
}

// If a save is cancelled while the store begins its upload or receives a part, nothing is left in the store. This also
// applies if the store begins the upload later, or stores the part after the upload was removed.
func TestDroppedInFlight(t *testing.T) {
	t.Parallel()
	for _, held := range []string{http.MethodPost, http.MethodPut} {
		arrived, goOn := make(chan bool, 1), make(chan bool)
		var mu sync.Mutex
		left, lists := "", 0
		h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			if r.Method == held {
				arrived <- true
				<-goOn
			}
			mu.Lock()
			defer mu.Unlock()
			switch r.Method {
			case http.MethodPost:
				left = "an upload"
				_, _ = io.WriteString(w, beginningOf("u"))
			case http.MethodPut:
				w.Header().Set("ETag", `"x"`)
			case http.MethodDelete:
				left = ""
				w.WriteHeader(http.StatusNoContent)
			default: // asks for the parts
				if lists++; lists == 1 && held == http.MethodPut {
					left = "a late part"
				}
				refuse(w, http.StatusNotFound, "NoSuchUpload")
			}
		}))
		opt := source.Options{Storage: map[string]string{"endpoint_url": h.URL, "anon": "true", "retries": "2"}}
		d, err := Create(bg, "s3://models/dropped", opt, 2*minPart)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Write(random(2*minPart), 0); err != nil {
			t.Fatal(err)
		}
		<-arrived
		d.StopSends()
		close(goOn)
		d.Drop()
		if left != "" || lists == 0 {
			t.Errorf("%s was answered late: %s is left, asked for parts %d times", held, left, lists)
		}
		h.Close()
	}
}

// If the store does not accept the ETag that it sends as a condition, the object stays and the undo says so.
func TestUndoWithWeakETags(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartS3(t, false)
	front := httptest.NewServer(forwarder(s, func(r *http.Response) error {
		if r.Request.Method == http.MethodHead {
			r.Header.Set("ETag", "W/"+r.Header.Get("ETag")) // as proxies do that may compress
		}
		return nil
	}))
	defer front.Close()
	uri := "s3://models/weak"
	d := published(t, with(s, "endpoint_url", front.URL), uri, []byte("ours"))
	if err := d.UndoPublish(); !errors.Is(err, errs.ErrNotSupported) || !strings.Contains(err.Error(), uri) {
		t.Error(err)
	}
	if b, err := get(uri, with(s)); string(b) != "ours" {
		t.Errorf("%q %v", b, err)
	}
}
