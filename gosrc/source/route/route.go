// Package route decides which servers a chain of redirects may reach, and which of the caller's credentials
// each request carries. All clients of remote stores use it for redirects, proxies and certificates.
//
// Credentials (headers, token, user and password) are sent only to the origin in the caller's URL (scheme, host and
// port). Once a chain has left the origin, they are not sent again, even if it returns. A redirect may only lead to
// http and https, and never from https to http. A user and password in its Location are ignored. A chain follows at
// most five redirects (Most).
//
// Every address is compared with the first address of the object's origin, both when it is dialled and when an
// idle connection is reused. Neither a redirect nor a changed DNS name may lead from an outer network into an
// inner one. A proxy chooses addresses itself, so with a proxy only the URL is compared.
package route

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
)

// Most is the number of redirects that a request may follow.
const Most = 5

// Refused is the error for a redirect that is not followed, or for a connection that is not permitted. Its class is
// errs.ErrPermission.
type Refused struct{ What string }

func (r *Refused) Error() string {
	return fmt.Sprintf("%v: %s is refused", errs.ErrPermission, r.What)
}
func (r *Refused) Unwrap() error { return errs.ErrPermission }

// A Hop is one request in a chain of redirects.
type Hop struct {
	URL *url.URL // without user, password and fragment
	// Home means that the chain has never left the origin, so this request carries the caller's credentials.
	Home bool

	origin string
	count  int
}

// Start returns the request for the caller's URL.
func Start(u *url.URL) Hop { return Hop{URL: bareURL(u), Home: true, origin: Origin(u)} }

// Here returns the start of a new chain at this URL.
func (h Hop) Here() Hop {
	h.count = 0
	return h
}

// Next returns the hop to a redirect's Location. The error is Refused, or has no class if a retry may get
// another response.
func (h Hop) Next(location string) (Hop, error) {
	to, err := h.URL.Parse(location)
	switch {
	case err != nil || location == "":
		return Hop{}, fmt.Errorf("a redirect without a valid Location")
	case to.Scheme != "http" && to.Scheme != "https":
		return Hop{}, &Refused{"a redirect to another scheme"}
	case !isPlainHost(to.Hostname()) || to.Opaque != "":
		return Hop{}, fmt.Errorf("a redirect without a valid Location")
	case h.URL.Scheme == "https" && to.Scheme == "http":
		return Hop{}, &Refused{"a redirect from https to http"}
	case h.count == Most:
		return Hop{}, fmt.Errorf("more than %d redirects", Most)
	}
	return Hop{URL: bareURL(to), Home: h.Home && Origin(to) == h.origin, origin: h.origin, count: h.count + 1}, nil
}

// Redirect reports whether a status is a redirect to a Location.
func Redirect(status int) bool {
	switch status {
	case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect,
		http.StatusPermanentRedirect:
		return true
	}
	return false
}

// mostWait is the longest pause that a server may ask for.
const mostWait = time.Hour

// WaitAsked returns how long a server that refuses a request asks to wait. It reads Retry-After, in seconds or as a
// date, or else the time until the exhausted windows of RateLimit begin again. 0 means that the server does not ask.
//
// Source: RFC 9110, 10.2.3; draft-ietf-httpapi-ratelimit-headers: `"name";r=0;t=25`.
func WaitAsked(h http.Header) time.Duration {
	if text := h.Get("Retry-After"); text != "" {
		if t, err := http.ParseTime(text); err == nil {
			return min(max(0, time.Until(t)), mostWait)
		}
		return secondsOf(text)
	}
	var wait time.Duration
	for window := range strings.SplitSeq(strings.Join(h.Values("RateLimit"), ","), ",") {
		params := map[string]string{}
		for param := range strings.SplitSeq(window, ";") {
			name, value, _ := strings.Cut(strings.TrimSpace(param), "=")
			params[name] = value
		}
		if params["r"] == "0" {
			wait = max(wait, secondsOf(params["t"]))
		}
	}
	return wait
}

// secondsOf parses a number of seconds. It returns 0 if text is not a number.
func secondsOf(text string) time.Duration {
	n, err := strconv.ParseUint(strings.TrimSpace(text), 10, 31)
	if err != nil {
		return 0
	}
	return min(time.Duration(n)*time.Second, mostWait)
}

// ContentRange parses a Content-Range header such as "bytes 0-9/100". total is -1 if the header does not state it.
func ContentRange(text string) (from, to, total int64, ok bool) {
	unit, rest, _ := strings.Cut(text, " ")
	span, all, hasTotal := strings.Cut(rest, "/")
	if !strings.EqualFold(unit, "bytes") || !hasTotal {
		return 0, 0, 0, false
	}
	number := func(s string) int64 {
		n, err := strconv.ParseUint(s, 10, 63)
		if err != nil || s[0] == '+' {
			ok = false
		}
		return int64(n)
	}
	ok, total = true, -1
	if all != "*" {
		total = number(all)
	}
	if span == "*" {
		return 0, -1, total, ok
	}
	a, b, hasTotal := strings.Cut(span, "-")
	if !hasTotal {
		return 0, 0, 0, false
	}
	from, to = number(a), number(b)
	return from, to, total, ok && from <= to && (total < 0 || to < total)
}

// Encoding returns the first content encoding of a response that changes its bytes, or "". identity does not change
// them. Neither does aws-chunked, which describes how the bytes were uploaded and which some stores return as a label.
func Encoding(h http.Header) string {
	for _, name := range strings.Split(strings.Join(h.Values("Content-Encoding"), ","), ",") {
		name = strings.TrimSpace(name)
		if name != "" && !strings.EqualFold(name, "identity") && !strings.EqualFold(name, "aws-chunked") {
			return PrintableText(name, 40)
		}
	}
	return ""
}

// PrintableText cuts a server's text after `most` bytes, and removes control and non-ASCII characters.
func PrintableText(s string, most int) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return -1
		}
		return r
	}, s[:min(len(s), most)])
}

// Origin returns a URL's scheme, host and port.
func Origin(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[strings.ToLower(u.Scheme)]
	}
	return strings.ToLower(u.Scheme) + "://" + net.JoinHostPort(strings.ToLower(u.Hostname()), port)
}

// isPlainHost reports whether a host is a name or an address in its usual form. Programs such as proxies
// interpret other forms (127.1, 0x7f000001, non-ASCII digits) differently.
func isPlainHost(host string) bool {
	if _, err := netip.ParseAddr(host); err == nil {
		return true
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	last := host[strings.LastIndexByte(host, '.')+1:]
	return last != "" && strings.Trim(last, "0123456789") != "" && !strings.HasPrefix(last, "0x") &&
		!strings.ContainsFunc(host, func(r rune) bool { return r <= ' ' || r >= 0x7f })
}

func bareURL(u *url.URL) *url.URL {
	c := *u
	c.User, c.Fragment, c.RawFragment = nil, "", ""
	return &c
}

// A Way tracks all requests for one object. The first address that it connects to determines which others are
// permitted. It is safe for concurrent use. The zero value is ready to use.
type Way struct {
	mu     sync.Mutex
	begun  bool
	origin netip.Addr // the zero address counts as the internet
}

type wayKey struct{}

// setFirst records the first address if it is not known yet, and refuses an address in a more private network.
func (w *Way) setFirst(at netip.Addr) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.begun {
		w.begun, w.origin = true, at
	}
	return refuseInward(w.origin, at)
}

// checkAddress refuses an address in a more private network than the first one.
func (w *Way) checkAddress(at netip.Addr) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.begun {
		return nil
	}
	return refuseInward(w.origin, at)
}

// refuseInward refuses a step from an outer network into an inner one: from the internet into a private network
// or this machine, and from anywhere to a link-local address, where clouds offer credentials.
func refuseInward(from, to netip.Addr) error {
	if from.Unmap() == to.Unmap() {
		return nil
	}
	out, _ := depthOf(from)
	if _, in := depthOf(to); in > out {
		return &Refused{"a connection into a private network"}
	}
	return nil
}

// checkDial is the dialer's hook. It is called with the resolved address before a connection is made.
func checkDial(ctx context.Context, _, address string, _ syscall.RawConn) error {
	w, _ := ctx.Value(wayKey{}).(*Way)
	at, err := netip.ParseAddrPort(address)
	if w == nil || err != nil {
		return nil
	}
	return w.checkAddress(at.Addr())
}

// Send sends one request with a client and returns the connection that it used. It does not follow redirects.
func (w *Way) Send(c *Client, r *http.Request) (*http.Response, net.Conn, error) {
	proxy, err := c.Proxy(r)
	if err != nil {
		return nil, nil, err
	}
	ctx := r.Context()
	if proxy != nil {
		// The proxy chooses the address. Only an address in the URL can be compared.
		err = w.setFirst(literalAddress(r.URL.Hostname()))
	} else {
		ctx = context.WithValue(ctx, wayKey{}, w)
	}
	if err != nil {
		return nil, nil, err
	}
	var mu sync.Mutex
	var conn net.Conn
	var refusal error
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) {
		mu.Lock()
		defer mu.Unlock()
		conn = i.Conn
		if proxy != nil {
			return
		}
		// The connection may have been dialled for another object. If it is closed here, nothing is sent: the
		// transport dials again, and checkDial returns the error.
		at, err := netip.ParseAddrPort(i.Conn.RemoteAddr().String())
		if err == nil {
			err = w.setFirst(at.Addr())
		}
		if err != nil {
			refusal = err
			Cut(i.Conn)
		}
	}})
	resp, err := c.RoundTrip(r.WithContext(ctx))
	mu.Lock()
	defer mu.Unlock()
	if refusal != nil {
		if err == nil {
			_ = resp.Body.Close()
		}
		return nil, nil, refusal
	}
	return resp, conn, err
}

// Cut closes a connection immediately, without the close message of TLS.
func Cut(conn net.Conn) {
	if secure, ok := conn.(*tls.Conn); ok {
		conn = secure.NetConn()
	}
	if c, ok := conn.(interface{ SetLinger(int) error }); ok {
		_ = c.SetLinger(0) // send a reset, so that the peer stops sending
	}
	_ = conn.Close()
}
