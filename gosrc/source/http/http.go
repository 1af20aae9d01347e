// Package http reads http://, https:// and hf:// objects.
//
// Opening requests the first bytes of the object. The response gives the size and the ETag that later reads require,
// and usually contains the format's whole header. Each read is a ranged GET whose body is read from the socket directly
// into the caller's memory. Package retry resumes interrupted ranges. A response is only used if it is exactly the
// requested range of the same version: one with a different Content-Range, ETag or size, or with a content encoding, is
// rejected. A changed object gives errs.ErrCorrupt.
//
// Servers without ranges are read in order by one GET; see spool.go. So are servers that send neither an ETag
// nor a date, because two requests could return bytes of different versions.
//
// Package route decides which servers may be asked and which credentials they receive; see follow.go.
package http

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/retry"
	"github.com/overwire/overwire/gosrc/source/route"
	"github.com/overwire/overwire/gosrc/source/spool"
)

// options are the supported keys of storage_options=.
var options = append([]string{"headers", "token", "cacert", "capath", "insecure"}, retry.Names...)

// A Source is an open object. It implements source.Source.
type Source struct {
	source.Source // *retry.Source or *spool.Stream
	o             *object
}

func openNamed(ctx context.Context, uri string, opt source.Options, r *revision) (*Source, error) {
	s, err := openScheme(ctx, uri, opt, r)
	if ctx.Err() != nil {
		return s, err
	}
	return s, errs.Place("open", uri, "", -1, err)
}

func openScheme(ctx context.Context, uri string, opt source.Options, r *revision) (*Source, error) {
	scheme := source.Scheme(uri)
	if err := opt.Check(scheme, options...); err != nil {
		return nil, err
	}
	tries, err := retry.Parse(opt)
	if err != nil {
		return nil, err
	}
	o := &object{uri: uri, revision: r}
	address := uri
	if scheme == "hf" {
		if o.at, opt, err = hubURL(uri, opt); err != nil {
			return nil, err
		}
		address = o.at(r.name)
	}
	if o.url, err = url.Parse(address); err != nil || o.url.Host == "" ||
		o.url.Scheme != "http" && o.url.Scheme != "https" {
		return nil, errs.New(errs.ErrArgument, "not a valid URL")
	}
	o.url.Fragment = ""
	if o.headers, err = headersOf(opt); err != nil {
		return nil, err
	}
	if o.client, err = holdClient(opt); err != nil {
		return nil, err
	}
	var s *Source
	err = retry.Do(ctx, tries, o.Judge, func(ctx context.Context) (err error) {
		s, err = o.requestFirst(ctx, tries)
		return err
	})
	if err == nil && s == nil { // no ranges, or an empty object
		var stream *spool.Stream
		if stream, err = spool.Open(ctx, &whole{object: o}, tries, opt.Outline); err == nil {
			s = &Source{stream, o}
		}
	}
	if err != nil {
		o.client.dropClient()
		return nil, err
	}
	return s, nil
}

// Facts returns the facts of the ranges or of the stream, with the object's identity and headers.
func (s *Source) Facts() source.Facts {
	f := s.Source.Facts()
	f.Identity, f.Settled = source.Pinned(s, s.pin())
	f.Headers = s.o.answer
	s.o.mu.Lock()
	defer s.o.mu.Unlock()
	f.SHA256 = s.o.sum
	return f
}

// pin returns what identifies the object's state: its ETag, otherwise its date, otherwise "". Weak ETags and
// recent dates are not used.
func (s *Source) pin() string {
	switch isDated := tagOfDate(s.o.etag, s.o.modified, s.Size()); {
	case isWeak(s.o.etag), (isDated || s.o.etag == "") && !isOldDate(s.o.date, s.o.modified, settle):
		return ""
	case s.o.etag != "" && !isDated:
		return s.o.etag
	}
	if q := s.o.url.RawQuery; q != "" { // objects with different queries may have the same date
		return fmt.Sprintf("%s %x", s.o.modified, sha256.Sum256([]byte(q)))
	}
	return s.o.modified
}

// settle is how old a date must be, by the server's clock, to identify a state.
const settle = 2 * time.Second

// isOldDate reports whether an object's date was at least age old when the server responded. Dates have a
// resolution of one second, so a second change within that second is not detected.
func isOldDate(date, modified string, age time.Duration) bool {
	now, err := http.ParseTime(date)
	then, err2 := http.ParseTime(modified)
	return err == nil && err2 == nil && now.Sub(then) >= age
}

// isWeak reports whether an ETag is weak: the bytes may then change without a change of the ETag.
func isWeak(etag string) bool { return strings.HasPrefix(etag, "W/") }

// tagOfDate reports whether an ETag only encodes date and size, as nginx's do. Such an ETag is as reliable as the date.
func tagOfDate(etag, modified string, size int64) bool {
	date, err := http.ParseTime(modified)
	return err == nil && etag == fmt.Sprintf(`"%x-%x"`, date.Unix(), size)
}

// An object is the state of a URL when it was opened. It implements retry.Fetcher.
type object struct {
	uri     string
	url     *url.URL // as the user wrote it
	headers http.Header
	client  *client

	// Only set for hf://.
	revision *revision
	at       func(rev string) string
	sum      string // SHA-256 of the object in hex, or "" if the hub does not report it

	size     int64
	answer   http.Header // headers of the first response
	etag     string      // as the server sent it, or ""
	modified string      // Last-Modified
	date     string      // Date of the first response

	way   route.Way
	mu    sync.Mutex
	moved *route.Hop // the last hop of the redirects; nil if there were none
}

func (o *object) URI() string  { return o.uri }
func (o *object) Size() int64  { return o.size }
func (o *object) Close() error { o.client.dropClient(); return nil }

// requestFirst requests the first bytes. It returns nil without an error if the server does not support ranges
// for this object, or sends neither a usable ETag nor a usable date.
func (o *object) requestFirst(ctx context.Context, tries retry.Options) (*Source, error) {
	resp, err := o.getObject(ctx, http.Header{"Range": {fmt.Sprintf("bytes=0-%d", source.HeadBytes-1)}})
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	from, to, total, isRange := route.ContentRange(resp.Header.Get("Content-Range"))
	switch {
	case resp.StatusCode == http.StatusPartialContent && !hasPin(resp, total):
		return nil, plain(resp)
	case resp.StatusCode == http.StatusRequestedRangeNotSatisfiable && isRange && total == 0:
		return nil, nil // perhaps empty: spool.Open sends a GET without a range
	case resp.StatusCode == http.StatusOK:
		if err := plain(resp); err != nil {
			return nil, err
		}
		return nil, nil
	case resp.StatusCode != http.StatusPartialContent:
		return nil, o.checkStatus(resp)
	}
	if err := plain(resp); err != nil {
		return nil, err
	}
	if !isRange || total < 1 || from != 0 || to != min(total, source.HeadBytes)-1 {
		return nil, errAnother
	}
	tries.Head = make([]byte, to+1)
	if _, err := io.ReadFull(resp.Body, tries.Head); err != nil {
		return nil, err
	}
	if n, _ := resp.Body.Read(make([]byte, 1)); n > 0 {
		return nil, errors.New("the response body is longer than the requested range")
	}
	o.answer = resp.Header
	o.size, o.etag, o.modified, o.date = total, resp.Header.Get("ETag"), resp.Header.Get("Last-Modified"),
		resp.Header.Get("Date")
	tries.Host, tries.Range = o.url.Scheme+"://"+o.url.Host, retry.RangeBytes
	return &Source{retry.New(o, tries), o}, nil
}

// Fetch requests a range; see retry.Fetcher.
func (o *object) Fetch(ctx context.Context, off, n int64) (io.ReadCloser, error) {
	h := http.Header{"Range": {fmt.Sprintf("bytes=%d-%d", off, off+n-1)}}
	o.pin(h)
	resp, err := o.getObject(ctx, h)
	if err != nil {
		return nil, err
	}
	if err := o.checkRange(resp, off, n); err != nil {
		_ = resp.Body.Close()
		return nil, err
	}
	return resp.Body, nil
}

// pin makes a request conditional: the server must return the object that was opened, or an error. Weak ETags
// cannot be used as conditions, so checkSame compares them.
func (o *object) pin(h http.Header) {
	switch {
	case o.etag != "" && !isWeak(o.etag):
		h.Set("If-Match", o.etag)
	case o.modified != "":
		h.Set("If-Unmodified-Since", o.modified)
	}
}

var errAnother = errors.New("the server returned a different range than requested")

// checkRange checks that a response is this range of the opened object. If the response does not match the
// request, the error has no class, because a retry may return another response.
func (o *object) checkRange(resp *http.Response, off, n int64) error {
	from, to, total, isRange := route.ContentRange(resp.Header.Get("Content-Range"))
	switch resp.StatusCode {
	case http.StatusPartialContent:
	case http.StatusOK:
		if err := o.checkSame(resp); err != nil {
			return err
		}
		return errors.New("the server returned the whole object instead of a range")
	case http.StatusRequestedRangeNotSatisfiable:
		return &changed{"it is shorter now"}
	default:
		return o.checkStatus(resp)
	}
	if err := plain(resp); err != nil {
		return err
	}
	if err := o.checkSame(resp); err != nil {
		return err
	}
	switch {
	case isRange && total >= 0 && total != o.size:
		return &changed{fmt.Sprintf("it had %d bytes and now has %d", o.size, total)}
	case !isRange || from != off || to != off+n-1:
		return errAnother
	case resp.ContentLength >= 0 && resp.ContentLength != n:
		return fmt.Errorf("the server returned %d bytes for a range of %d bytes", resp.ContentLength, n)
	}
	return nil
}

// hasPin reports whether a response identifies a version of an object, by a strong ETag or by a date that is at
// least a second old. Within that second, another version could get the same date. If the server sends no time,
// this machine's clock is used.
func hasPin(resp *http.Response, size int64) bool {
	etag, modified, date := resp.Header.Get("ETag"), resp.Header.Get("Last-Modified"), resp.Header.Get("Date")
	if etag != "" && !isWeak(etag) && !tagOfDate(etag, modified, size) {
		return true
	}
	if date == "" {
		date = time.Now().UTC().Format(http.TimeFormat)
	}
	return isOldDate(date, modified, time.Second)
}

// checkSame compares the ETag and the date with those of the opened object.
func (o *object) checkSame(resp *http.Response) error {
	if tag := resp.Header.Get("ETag"); tag != o.etag {
		return &changed{"its ETag has changed"}
	}
	if m := resp.Header.Get("Last-Modified"); m != o.modified && (o.etag == "" || isWeak(o.etag)) {
		return &changed{"its date has changed"}
	}
	return nil
}

// plain refuses encoded bodies and multipart ranges.
func plain(resp *http.Response) error {
	if e := route.Encoding(resp.Header); e != "" {
		return errs.New(errs.ErrNotSupported, "the object has the content encoding %q", e)
	}
	if resp.StatusCode == http.StatusPartialContent &&
		strings.HasPrefix(resp.Header.Get("Content-Type"), "multipart/byteranges") {
		return errors.New("the server returned one range in several parts")
	}
	return nil
}

// changed is the error for an object that was replaced.
type changed struct{ what string }

func (c *changed) Error() string { return c.what }

// failed is a response with an error status.
type failed struct {
	code  int
	after time.Duration
}

func (f *failed) Error() string {
	text := fmt.Sprintf("HTTP %d %s", f.code, http.StatusText(f.code))
	if f.after >= time.Second {
		text += fmt.Sprintf(": the server asked to wait %.0f s", f.after.Seconds())
	}
	return text
}

func (f *failed) mayRetry() bool {
	switch f.code {
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests:
		return true
	case http.StatusNotImplemented, http.StatusHTTPVersionNotSupported:
		return false
	}
	return f.code >= 500
}

func (o *object) checkStatus(resp *http.Response) error {
	f := &failed{code: resp.StatusCode}
	f.after = route.WaitAsked(resp.Header)
	if f.code == http.StatusServiceUnavailable || f.code == http.StatusTooManyRequests {
		f.after = max(f.after, time.Millisecond) // the server is overloaded
	}
	switch f.code {
	case http.StatusPreconditionFailed:
		return &changed{"the server no longer has the object that was opened"}
	case http.StatusNotFound, http.StatusGone:
		return errs.New(errs.ErrNotFound, "%v", f)
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusProxyAuthRequired:
		return errs.New(errs.ErrPermission, "%v", f)
	}
	if !f.mayRetry() {
		return errs.WithRule(source.RuleRefused, errs.New(errs.ErrIO, "%v", f))
	}
	return f
}

// Judge classifies an error; see retry.Fetcher.
func (o *object) Judge(err error) (retry.Verdict, time.Duration) {
	var (
		gone *changed
		busy *failed
		name *net.DNSError
		// Errors from a server that does not support our TLS versions.
		header tls.RecordHeaderError
		alert  tls.AlertError
	)
	switch {
	case errors.As(err, &gone):
		return retry.Changed, 0
	case errors.As(err, &busy):
		return retry.Busy, busy.after
	case errors.As(err, &name) && name.IsNotFound, errs.Classed(err), errors.As(err, &header), errors.As(err, &alert):
		return retry.Never, 0
	}
	return retry.Again, 0
}

// takeSum records the SHA-256 of a large file from a response of the hub. The hub sends it as the ETag of the linked
// object. For small files it sends a shorter hash, which is ignored.
func (o *object) takeSum(resp *http.Response) {
	sum := strings.ToLower(strings.Trim(resp.Header.Get("X-Linked-ETag"), `"`))
	if b, err := hex.DecodeString(sum); err != nil || len(b) != sha256.Size {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.sum = sum
}

// homeURL returns the URL of the first request.
func (o *object) homeURL() *url.URL {
	if o.revision == nil {
		return o.url
	}
	u, err := url.Parse(o.at(o.revision.commitNow()))
	if err != nil { // cannot happen: openScheme has parsed the same URL with the revision's name
		return o.url
	}
	return u
}

// A whole is an object that is read in order by one GET, because the server does not support ranges or sends nothing
// that identifies the object's version. It implements spool.Whole.
type whole struct {
	*object
	pinned bool // a response has identified the object
}

// Whole sends one GET; see spool.Whole.
func (w *whole) Whole(ctx context.Context) (body io.ReadCloser, length int64, err error) {
	h := http.Header{}
	if w.pinned {
		w.pin(h)
	}
	resp, err := w.getObject(ctx, h)
	if err != nil {
		return nil, 0, err
	}
	if err = plain(resp); resp.StatusCode != http.StatusOK {
		err = w.checkStatus(resp)
	}
	if err == nil && w.pinned {
		err = w.checkSame(resp)
	}
	if err != nil {
		_ = resp.Body.Close()
		return nil, 0, err
	}
	if !w.pinned {
		w.pinned = true
		w.answer = resp.Header
		w.etag, w.modified, w.date = resp.Header.Get("ETag"), resp.Header.Get("Last-Modified"), resp.Header.Get("Date")
	}
	return resp.Body, resp.ContentLength, nil
}
