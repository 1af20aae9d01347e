package s3

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

// A store's redirect is never followed, for any target and any request. The session token and the signature are
// only sent to the host for which they were made.
func TestRoutes(t *testing.T) {
	w := sourcetest.NewWorld(t)
	opt := source.Options{Storage: map[string]string{"endpoint_url": w.URL("http://{pub}"), "key": "AKIAPLANTED",
		"secret": sourcetest.Planted,
		"token":  sourcetest.Planted, "retries": "0"}}
	anon := source.Options{Storage: map[string]string{"endpoint_url": w.URL("http://{pub}"), "anon": "true",
		"retries": "0"}}
	for _, location := range []string{
		"/models/other", "http://{pub2}/b?" + sourcetest.Planted, "https://{tls}/b", "https://{tls2}/b",
		"http://{net}/b", "http://{link}/b",
		"http://127.0.0.1:{tls:}/b", "http://u:p@{pub2}/b", "//{pub2}/b", "file:///etc/passwd", "", "http://[",
	} {
		for _, code := range []int{301, 302, 303, 307, 308} {
			for what, run := range map[string]func(source.Options) error{
				"get": func(o source.Options) error { _, err := get("s3://models/x", o); return err },
				"put": func(o source.Options) error {
					d, err := Create(bg, "s3://models/x", o, 1)
					if err != nil {
						return err
					}
					defer d.Drop()
					return errors.Join(d.Write([]byte("x"), 0), d.Finish(1), d.Publish())
				},
				"remove": func(o source.Options) error { return Remove(bg, "s3://models/x", o) },
				"list":   func(o source.Options) error { _, err := Walk(bg, "s3://models/x/", o, true); return err },
			} {
				for kind, o := range map[string]source.Options{"signed": opt, "unsigned": anon} {
					w.Script(code, map[string]string{"pub/models/x": location, "pub/models/": location,
						"pub/models": location})
					err := run(o)
					if !errors.Is(err, errs.ErrPermission) || !strings.Contains(err.Error(), "redirect") {
						t.Errorf("%s, %s, %d to %s: %v", kind, what, code, location, err)
					} else {
						noSecret(t, err)
					}
					for _, at := range w.Seen() {
						if !strings.HasPrefix(at, "pub/models") || strings.HasPrefix(at, "pub/models/other") {
							t.Errorf("%s, %s, %d to %s: asked %s", kind, what, code, location, at)
						}
					}
				}
			}
		}
	}
}

// Redirects from services that provide credentials are not followed either, because requests to them also
// contain credentials.
func TestRoutesOfCredentials(t *testing.T) {
	w := sourcetest.NewWorld(t)
	for what, env := range map[string]map[string]string{
		"container": {"AWS_CONTAINER_CREDENTIALS_FULL_URI": w.URL("http://{pub}/a"),
			"AWS_CONTAINER_AUTHORIZATION_TOKEN": sourcetest.Planted},
		"instance": {"AWS_EC2_METADATA_SERVICE_ENDPOINT": w.URL("http://{pub}")},
	} {
		for _, code := range []int{302, 307} {
			w.Script(code, map[string]string{"pub/a": "http://{pub2}/b", "pub/latest/api/token": "http://{pub2}/b",
				"pub/latest/meta-data/iam/security-credentials/": "http://{pub2}/b"})
			ctx, cancel := context.WithTimeout(bg, 20*time.Second)
			c, err := newClient(ctx, source.Options{Env: env})
			if err != nil {
				t.Fatal(err)
			}
			_, err = c.creds.Retrieve(ctx)
			cancel()
			seen := strings.Join(w.Seen(), " ")
			if err == nil || seen == "" || strings.Contains(seen, "pub2") {
				t.Errorf("%s, %d: %v after %q", what, code, err, seen)
			}
			c.transport.CloseIdleConnections()
		}
	}
}

// A bucket in another region is requested there with a new signature, in whatever form the store reports the
// region. The Location is not followed.
func TestRegions(t *testing.T) {
	var elsewhere atomic.Int64
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { elsewhere.Add(1) }))
	t.Cleanup(other.Close)
	for _, code := range []int{301, 302, 307, 308, 400, 403} {
		h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if !strings.Contains(r.Header.Get("Authorization"), "/eu-moved-1/s3/") {
				w.Header().Set("X-Amz-Bucket-Region", "eu-moved-1")
				w.Header().Set("Location", other.URL)
				w.WriteHeader(code)
				return
			}
			w.Header().Set("ETag", `"x"`)
			http.ServeContent(w, r, "", time.Time{}, strings.NewReader("hello"))
		}))
		b, err := get("s3://b/k", source.Options{Storage: map[string]string{"endpoint_url": h.URL, "key": "k",
			"secret": "s", "retries": "0"}})
		if err != nil || string(b) != "hello" {
			t.Errorf("%d: %q %v", code, b, err)
		}
		h.Close()
	}
	if elsewhere.Load() != 0 {
		t.Error("a Location was followed")
	}
}

// If no credentials are configured and the machine has none, public objects are read unsigned, and other
// objects give an error about missing credentials. If configured credentials cannot be obtained, no request is
// sent.
func TestPublic(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartS3(t, false)
	put(t, with(s), "s3://models/public/x", []byte("hello"))
	put(t, with(s), "s3://models/private/x", []byte("hidden"))
	owner, err := newClient(bg, with(s))
	if err != nil {
		t.Fatal(err)
	}
	bucket, policy := "models", `{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":"*","Action":["s3:GetObject"],`+
		`"Resource":["arn:aws:s3:::models/public/*"]}]}`
	if _, err := owner.apiFor(bucket, true).PutBucketPolicy(bg,
		&s3.PutBucketPolicyInput{Bucket: &bucket, Policy: &policy}); err != nil {
		t.Fatal(err)
	}
	nothing := with(s, "key", "", "secret", "")
	nothing.Env = map[string]string{"AWS_EC2_METADATA_DISABLED": "true"}
	for range 2 {
		if b, err := get("s3://models/public/x", nothing); err != nil || string(b) != "hello" {
			t.Errorf("%q %v", b, err)
		}
		_, err := get("s3://models/private/x", nothing)
		if !errors.Is(err, errs.ErrPermission) || !strings.Contains(err.Error(), "no credentials") ||
			!strings.Contains(err.Error(), "AccessDenied") {
			t.Error(err)
		}
		noSecret(t, err)
	}
	if _, err := Presign(bg, "s3://models/public/x", nothing, time.Hour); !errors.Is(err, errs.ErrPermission) {
		t.Errorf("presigned a URL without credentials: %v", err)
	}
	for _, env := range []map[string]string{
		{"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:1/x"},
		{"AWS_WEB_IDENTITY_TOKEN_FILE": "/none", "AWS_ROLE_ARN": "arn:aws:iam::1:role/web"},
	} {
		named := with(s, "key", "", "secret", "")
		named.Env = env
		if _, err := get("s3://models/public/x", named); !errors.Is(err, errs.ErrPermission) {
			t.Errorf("%v: %v", env, err)
		}
	}
}

// Certificates only matter for https: an invalid setting does not affect a store without TLS. The environment
// is that of the call.
func TestCertificates(t *testing.T) {
	h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("ETag", `"x"`)
		http.ServeContent(w, r, "", time.Time{}, strings.NewReader("hello"))
	}))
	t.Cleanup(h.Close)
	for _, name := range []string{"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
		"AWS_CA_BUNDLE", "cacert"} {
		opt := source.Options{Storage: map[string]string{"endpoint_url": h.URL, "anon": "true", "retries": "0"},
			Env: map[string]string{name: "/none.pem"}}
		if name == "cacert" {
			opt.Storage[name], opt.Env = "/none.pem", nil
		}
		if b, err := get("s3://b/k", opt); err != nil || string(b) != "hello" {
			t.Errorf("%s: %q %v", name, b, err)
		}
		opt.Storage["endpoint_url"] = strings.Replace(h.URL, "http:", "https:", 1)
		if _, err := get("s3://b/k", opt); !errors.Is(err, errs.ErrNotFound) ||
			!strings.Contains(fmt.Sprint(err), "/none.pem") {
			t.Errorf("%s, with TLS: %v", name, err)
		}
	}
	s := sourcetest.StartS3(t, true)
	put(t, with(s), "s3://models/x", []byte("hello"))
	opt := with(s, "cacert", "")
	for _, name := range []string{"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE"} {
		opt.Env = nil
		if _, err := get("s3://models/x", opt); !errors.Is(err, errs.ErrPermission) {
			t.Errorf("unknown authority: %v", err)
		}
		opt.Env = map[string]string{name: s.CA}
		if b, err := get("s3://models/x", opt); err != nil || string(b) != "hello" {
			t.Errorf("%s: %q %v", name, b, err)
		}
	}
}
