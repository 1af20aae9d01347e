package s3

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

// A bucket that only accepts uploads with a checksum, such as one with a default retention, gets a CRC32C in a
// header for objects and parts, over http and TLS. An upload begun without a checksum is ended, and later
// uploads have one from the start. Other buckets get no checksums.
func TestUploadsWithChecksums(t *testing.T) {
	t.Parallel()
	for _, isTLS := range []bool{false, true} {
		var mu sync.Mutex
		var asked []string
		wants := true
		fake := &fakeStore{parts: map[string][]byte{}, complete: []func(http.ResponseWriter, *fakeStore){
			func(w http.ResponseWriter, f *fakeStore) {
				f.store()
				_, _ = fmt.Fprintf(w, "<CompleteMultipartUploadResult><ETag>&quot;%s&quot;</ETag></CompleteMultipartUploadResult>", f.etag)
			}},
			put: func(w http.ResponseWriter, f *fakeStore, p []byte) {
				f.had, f.date = p, time.Now()
				w.Header().Set("ETag", `"x"`)
			}}
		handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			mu.Lock()
			defer mu.Unlock()
			body, _ := io.ReadAll(r.Body)
			crc := crc32.Checksum(body, castagnoli)
			sum := base64.StdEncoding.EncodeToString(binary.BigEndian.AppendUint32(nil, crc))
			word := r.Method
			if r.Header.Get("X-Amz-Checksum-Crc32c") == sum && r.Header.Get("X-Amz-Sdk-Checksum-Algorithm") == "CRC32C" ||
				r.Header.Get("X-Amz-Checksum-Algorithm") == "CRC32C" || strings.Contains(string(body), "ChecksumCRC32C") {
				word += "+"
			}
			if asked = append(asked, word); r.Header.Get("X-Amz-Trailer") != "" || r.Header.Get("Content-Encoding") != "" {
				t.Errorf("%s has a trailer", r.Method)
			}
			if wants && word == http.MethodPut {
				refuse(w, http.StatusBadRequest, "InvalidRequest")
				return
			}
			r.Body = io.NopCloser(strings.NewReader(string(body)))
			fake.ServeHTTP(w, r)
		})
		server := httptest.NewUnstartedServer(handler)
		opt := source.Options{Storage: map[string]string{"key": "k", "secret": "s", "retries": "0", "connections": "1"}}
		if isTLS {
			server.StartTLS()
			opt.Storage["cacert"] = filepath.Join(t.TempDir(), "ca.pem")
			if err := os.WriteFile(opt.Storage["cacert"], pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE",
				Bytes: server.Certificate().Raw}), 0o600); err != nil {
				t.Fatal(err)
			}
		} else {
			server.Start()
		}
		t.Cleanup(server.Close)
		opt.Storage["endpoint_url"] = server.URL
		for i, c := range []struct {
			data []byte
			want string
		}{
			{random(minPart + 1), "[POST PUT DELETE POST+ PUT+ PUT+ POST+]"}, {random(minPart + 1), "[POST+ PUT+ PUT+ POST+]"},
			{[]byte("x"), "[PUT+]"}, {[]byte("x"), "[PUT]"}, {random(minPart + 1), "[POST PUT PUT POST]"},
		} {
			mu.Lock()
			asked = nil
			if i == 3 { // another store, about which nothing is known
				wants, opt.Storage["retries"] = false, "1"
			}
			mu.Unlock()
			err := publish(t, opt, "m", c.data)
			if err != nil || fmt.Sprint(asked) != c.want || string(fake.had) != string(c.data) {
				t.Errorf("TLS %v, upload %d: %v, %v", isTLS, i, asked, err)
			}
		}
		mu.Lock()
		wants, asked, opt.Storage["retries"] = true, nil, "2"
		mu.Unlock()
		if err := publish(t, opt, "m", []byte("x")); err != nil || fmt.Sprint(asked) != "[PUT PUT+]" {
			t.Errorf("TLS %v: %v, %v", isTLS, asked, err)
		}
	}
}

// A refusal for a reason other than a missing checksum is reported with the store's code.
func TestRefusedUploads(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.ReadAll(r.Body)
		refuse(w, http.StatusBadRequest, "EntityTooLarge")
	}))
	t.Cleanup(server.Close)
	opt := source.Options{Storage: map[string]string{"anon": "true", "endpoint_url": server.URL}}
	for _, data := range [][]byte{[]byte("x"), random(minPart + 1)} {
		if err := publish(t, opt, "m", data); !errors.Is(err, errs.ErrArgument) || !strings.Contains(err.Error(), "EntityTooLarge") {
			t.Error(err)
		}
	}
}

// If a proxy refuses "Expect: 100-continue", the body is sent without it, in this request and in later ones.
func TestExpectationFailed(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartS3(t, false)
	var mu sync.Mutex
	var expected []string
	store := forwarder(s, nil)
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPut {
			mu.Lock()
			expected = append(expected, r.Header.Get("Expect"))
			mu.Unlock()
		}
		if r.Header.Get("Expect") != "" {
			w.WriteHeader(http.StatusExpectationFailed)
			return
		}
		store.ServeHTTP(w, r)
	}))
	t.Cleanup(front.Close)
	opt := with(s, "endpoint_url", front.URL, "connections", "1")
	data := random(minPart + 3<<20)
	for range 2 {
		if err := publish(t, opt, "m", data); err != nil {
			t.Fatal(err)
		}
	}
	if back, err := get("s3://models/m", with(s)); err != nil || !slices.Equal(back, data) {
		t.Error(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if fmt.Sprint(expected) != "[100-continue    ]" {
		t.Errorf("%q", expected)
	}
}

// Requests do not sign Accept-Encoding, which front ends may change: reads, saves, lists, removals, and
// presigned URLs.
func TestUnsignedEncoding(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartS3(t, false)
	var mu sync.Mutex
	seen := map[string]bool{}
	opt := with(s, "endpoint_url", fronted(t, s, func(r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		signed := r.Header.Get("Authorization") + r.URL.Query().Get("X-Amz-SignedHeaders")
		if seen[r.Method] = true; !strings.Contains(signed, "host") || strings.Contains(signed, "accept-encoding") {
			t.Errorf("%s %s: %q", r.Method, r.URL, signed)
		}
		r.Header.Set("Accept-Encoding", r.Header.Get("Accept-Encoding")+",gzip(gfe)")
	}, nil))
	large := random(minPart + 1)
	err := errors.Join(publish(t, opt, "f/small", []byte("x")), publish(t, opt, "f/large", large))
	back, getErr := get("s3://models/f/large", opt)
	files, listErr := Walk(bg, "s3://models/f/", opt, true)
	url, signErr := Presign(bg, "s3://models/f/small", opt, time.Hour)
	if err = errors.Join(err, getErr, listErr, signErr); err != nil || !slices.Equal(back, large) || len(files) != 2 {
		t.Fatal(err)
	}
	resp, err := http.Get(url)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("%v, %v", resp, err)
	}
	resp.Body.Close()
	if err := Remove(bg, "s3://models/f/small", opt); err != nil || len(seen) != 4 {
		t.Errorf("%v, %v", err, seen)
	}
}
