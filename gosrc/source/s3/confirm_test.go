package s3

import (
	"bytes"
	"crypto/md5"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

// A fakeStore stores one object and responds as its fields specify.
type fakeStore struct {
	mu    sync.Mutex
	parts map[string][]byte
	had   []byte // the object
	etag  string
	date  time.Time

	complete []func(w http.ResponseWriter, f *fakeStore) // responses to completions; the last one repeats
	put      func(w http.ResponseWriter, f *fakeStore, p []byte)
	remove   func(w http.ResponseWriter)
	list     string
	noETags  bool // neither for parts nor for the object
	oddETags bool // ETags that are not MD5s
	tries    int
}

func (f *fakeStore) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	query := r.URL.Query()
	body, _ := io.ReadAll(r.Body)
	switch {
	case r.Method == http.MethodPost && query.Has("uploads"):
		_, _ = io.WriteString(w, "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
	case r.Method == http.MethodPost:
		answer := f.complete[min(f.tries, len(f.complete)-1)]
		f.tries++
		answer(w, f)
	case r.Method == http.MethodPut && query.Has("uploadId"):
		f.parts[query.Get("partNumber")] = body
		if !f.noETags {
			w.Header().Set("ETag", `"`+f.sum(body)+`"`)
		}
	case r.Method == http.MethodPut:
		f.put(w, f, body)
	case r.Method == http.MethodDelete && !query.Has("uploadId"):
		f.remove(w)
	case r.Method == http.MethodGet && query.Has("list-type"):
		_, _ = io.WriteString(w, f.list)
	case query.Has("uploadId"): // for an upload that has ended
		refuse(w, http.StatusNotFound, "NoSuchUpload")
	case f.had == nil:
		refuse(w, http.StatusNotFound, "NoSuchKey")
	default:
		if f.etag != "" {
			w.Header().Set("ETag", `"`+f.etag+`"`)
		}
		http.ServeContent(w, r, "", f.date, bytes.NewReader(f.had))
	}
}

func refuse(w http.ResponseWriter, status int, code string) {
	w.WriteHeader(status)
	_, _ = fmt.Fprintf(w, "<Error><Code>%s</Code></Error>", code)
}

func (f *fakeStore) sum(p []byte) string {
	if f.oddETags {
		return fmt.Sprintf("odd%d", len(p))
	}
	return fmt.Sprintf("%x", md5.Sum(p))
}

// store assembles the object from its parts.
func (f *fakeStore) store() {
	f.had, f.date = nil, time.Now()
	sums := []byte{}
	for k := 1; k <= len(f.parts); k++ {
		p := f.parts[fmt.Sprint(k)]
		f.had = append(f.had, p...)
		s := md5.Sum(p)
		sums = append(sums, s[:]...)
	}
	if f.etag = fmt.Sprintf("%x-%d", md5.Sum(sums), len(f.parts)); f.oddETags {
		f.etag = "odd"
	}
}

func serveFake(t *testing.T, f *fakeStore) source.Options {
	f.parts = map[string][]byte{}
	h := httptest.NewServer(f)
	t.Cleanup(h.Close)
	return source.Options{Storage: map[string]string{"endpoint_url": h.URL, "anon": "true", "retries": "2"}}
}

// publish writes an object and returns the error of its publication or of its parts.
func publish(t *testing.T, opt source.Options, name string, data []byte) error {
	t.Helper()
	d, err := Create(bg, "s3://models/"+name, opt, int64(len(data)))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Drop()
	if err := d.Write(data, 0); err != nil {
		return err
	}
	if err := d.Finish(int64(len(data))); err != nil {
		return err
	}
	return d.Publish()
}

// An upload counts as complete only if the response contains its ETag, or if a later request finds the object.
// The status is not enough.
func TestCompletion(t *testing.T) {
	t.Parallel()
	data, other := random(minPart+1), make([]byte, minPart+1)
	empty := func(http.ResponseWriter, *fakeStore) {}
	lost := func(_ http.ResponseWriter, f *fakeStore) { f.store() }
	torn := func(w http.ResponseWriter, f *fakeStore) {
		f.store()
		_, _ = io.WriteString(w, "<CompleteMultipartUploadResult><ETag>&quot;")
	}
	unknown := func(w http.ResponseWriter, _ *fakeStore) { refuse(w, http.StatusNotFound, "NoSuchUpload") }
	inside := func(w http.ResponseWriter, _ *fakeStore) { refuse(w, http.StatusOK, "InternalError") }
	result := func(w http.ResponseWriter, f *fakeStore) {
		f.store()
		_, _ = fmt.Fprintf(w, "<CompleteMultipartUploadResult><ETag>&quot;%s&quot;</ETag></CompleteMultipartUploadResult>", f.etag)
	}
	web := func(w http.ResponseWriter, _ *fakeStore) { _, _ = io.WriteString(w, "<html>log in</html>") }
	type answers = []func(http.ResponseWriter, *fakeStore)
	for _, c := range []struct {
		what   string
		f      *fakeStore
		stored bool
	}{
		{"empty response, not stored", &fakeStore{complete: answers{empty}}, false},
		{"empty response, another object of the same size",
			&fakeStore{complete: answers{empty}, had: other, etag: strings.Repeat("0", 32) + "-2", date: time.Now()},
			false},
		{"empty response, stored", &fakeStore{complete: answers{lost}}, true},
		{"empty response, then a result", &fakeStore{complete: answers{empty, result}}, true},
		{"truncated response, stored", &fakeStore{complete: answers{torn}}, true},
		{"HTML page of a proxy", &fakeStore{complete: answers{web}}, false},
		{"error with status 200", &fakeStore{complete: answers{inside}}, false},
		{"error with status 200, then a result", &fakeStore{complete: answers{inside, result}}, true},
		{"error, then unknown upload, not stored", &fakeStore{complete: answers{inside, unknown}}, false},
		{"error, then unknown upload, stored", &fakeStore{complete: answers{
			func(w http.ResponseWriter, f *fakeStore) { f.store(); inside(w, f) }, unknown}}, true},
		{"unknown upload", &fakeStore{complete: answers{unknown}, had: data, date: time.Now()}, false},
		{"unusual ETags, an older object", &fakeStore{oddETags: true, complete: answers{empty}, had: other,
			date: time.Now().Add(-time.Hour)}, false},
		{"unusual ETags, stored", &fakeStore{oddETags: true, complete: answers{lost}}, true},
		{"parts without ETags", &fakeStore{noETags: true, complete: answers{result}}, false},
	} {
		t.Run(c.what, func(t *testing.T) {
			t.Parallel()
			err := publish(t, serveFake(t, c.f), "m", data)
			if (err == nil) != c.stored || c.stored && !bytes.Equal(c.f.had, data) {
				t.Errorf("%v, the store has %d bytes", err, len(c.f.had))
			}
			if err != nil && !errors.Is(err, errs.ErrIO) && !errors.Is(err, errs.ErrNotFound) ||
				err != nil && !strings.Contains(err.Error(), "s3://models/m") {
				t.Error(err)
			}
		})
	}
}

// A small object counts as stored only if the response contains its ETag, or if the object can be read back.
func TestPutAnswers(t *testing.T) {
	t.Parallel()
	data := []byte("hello")
	keep := func(_ http.ResponseWriter, f *fakeStore, p []byte) { f.had = p }
	for what, c := range map[string]struct {
		f      *fakeStore
		stored bool
	}{
		"nothing stored": {&fakeStore{put: func(http.ResponseWriter, *fakeStore, []byte) {}}, false},
		"another object": {&fakeStore{put: func(http.ResponseWriter, *fakeStore, []byte) {},
			had: []byte("hallo")}, false},
		"a longer one": {&fakeStore{put: func(http.ResponseWriter, *fakeStore, []byte) {},
			had: []byte("hello!")}, false},
		"stored, without ETag": {&fakeStore{put: keep}, true},
		"stored, and its ETag": {&fakeStore{put: func(w http.ResponseWriter, f *fakeStore, p []byte) {
			w.Header().Set("ETag", `"x"`)
			f.had = p
		}}, true},
		"an error in the answer": {&fakeStore{put: func(w http.ResponseWriter, _ *fakeStore, _ []byte) {
			refuse(w, 200, "InternalError")
		}}, false},
	} {
		if err := publish(t, serveFake(t, c.f), "m", data); (err == nil) != c.stored ||
			err != nil && !errors.Is(err, errs.ErrIO) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// With Once, an object is only created if none exists. An existing object is preserved and gives an argument
// error, unless an earlier attempt of this write created it. A store that does not support such writes gets an
// unconditional one.
func TestOnce(t *testing.T) {
	t.Parallel()
	small, large := []byte("hello"), random(minPart+1)
	tries := 0
	first := func(answer func(w http.ResponseWriter)) func(http.ResponseWriter, *fakeStore, []byte) {
		return func(w http.ResponseWriter, f *fakeStore, p []byte) {
			if tries++; tries == 1 {
				answer(w)
				return
			}
			w.Header().Set("ETag", `"x"`)
			f.had = p
		}
	}
	refusing := func(status int, code string) func(http.ResponseWriter) {
		return func(w http.ResponseWriter) { refuse(w, status, code) }
	}
	failed := refusing(http.StatusPreconditionFailed, "PreconditionFailed")
	completed := "<CompleteMultipartUploadResult><ETag>&quot;%s&quot;</ETag></CompleteMultipartUploadResult>"
	multipart := func(w http.ResponseWriter, f *fakeStore) {
		f.store()
		_, _ = fmt.Fprintf(w, completed, f.etag)
	}
	type answers = []func(http.ResponseWriter, *fakeStore)
	for _, c := range []struct {
		what string
		f    *fakeStore
		data []byte
		want error
	}{
		{"no existing object", &fakeStore{put: first(refusing(http.StatusServiceUnavailable, "SlowDown"))}, small, nil},
		{"another object exists", &fakeStore{had: []byte("hallo"), put: func(w http.ResponseWriter, _ *fakeStore, _ []byte) {
			failed(w)
		}}, small, errs.ErrArgument},
		{"response lost", &fakeStore{put: func(w http.ResponseWriter, f *fakeStore, p []byte) {
			if f.had != nil {
				failed(w)
				return
			}
			f.had = p
			refuse(w, http.StatusInternalServerError, "InternalError")
		}}, small, nil},
		{"condition not supported", &fakeStore{put: first(refusing(http.StatusNotImplemented, "NotImplemented"))}, small,
			nil},
		{"concurrent write", &fakeStore{put: first(refusing(http.StatusConflict, "ConditionalRequestConflict"))},
			small, nil},
		{"parts, no existing object", &fakeStore{complete: answers{multipart}}, large, nil},
		{"parts, another object exists", &fakeStore{had: small, complete: answers{func(w http.ResponseWriter, _ *fakeStore) {
			failed(w)
		}}}, large, errs.ErrArgument},
		{"parts, response lost", &fakeStore{complete: answers{
			func(w http.ResponseWriter, f *fakeStore) {
				f.store()
				refuse(w, http.StatusInternalServerError, "InternalError")
			},
			func(w http.ResponseWriter, _ *fakeStore) { failed(w) }}}, large, nil},
		{"parts, condition not supported", &fakeStore{complete: answers{
			func(w http.ResponseWriter, _ *fakeStore) { refusing(http.StatusNotImplemented, "NotImplemented")(w) },
			multipart}}, large, nil},
	} {
		tries = 0
		opt := serveFake(t, c.f)
		opt.Once = true
		before := bytes.Clone(c.f.had)
		err := publish(t, opt, "m", c.data)
		want := c.data
		if c.want != nil {
			want = before
		}
		if !errors.Is(err, c.want) || !bytes.Equal(c.f.had, want) {
			t.Errorf("%s: %v, the store has %d bytes", c.what, err, len(c.f.had))
		}
	}
}

// A response of 200 that is not a listing, or that contains an error, is treated neither as an empty folder nor
// as a deletion.
func TestOtherAnswers(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"", "<html></html>", "<Error><Code>InternalError</Code></Error>"} {
		opt := serveFake(t, &fakeStore{list: text})
		if _, err := Walk(bg, "s3://models/m/", opt, false); !errors.Is(err, errs.ErrIO) {
			t.Errorf("%q: %v", text, err)
		}
	}
	opt := serveFake(t, &fakeStore{list: "<ListBucketResult><Name>models</Name></ListBucketResult>",
		remove: func(w http.ResponseWriter) { refuse(w, http.StatusOK, "InternalError") }})
	if _, err := Walk(bg, "s3://models/m/", opt, false); !errors.Is(err, errs.ErrNotFound) {
		t.Error(err)
	}
	if err := Remove(bg, "s3://models/m", opt); !errors.Is(err, errs.ErrIO) {
		t.Error(err)
	}
	opt = serveFake(t, &fakeStore{remove: func(w http.ResponseWriter) { w.WriteHeader(http.StatusNoContent) }})
	if err := Remove(bg, "s3://models/m", opt); err != nil {
		t.Error(err)
	}
}
