// Package route decides which server may be asked after which, and what the
// caller gave goes along. Redirects, proxies and certificates of every client
// of remote stores come from here.
//
// What the caller gave (headers, token, user and password) goes to the origin
// that the caller named: scheme, host and port. It goes to no other, and a
// chain that has left the origin does not carry it back. A redirect stays
// within http and https, never leaves https, and its Location brings no user
// and no password. At most Most redirects are followed.
//
// Every address that is connected to is compared with the first one of the
// object's origin, when it is connected to and again when an idle connection
// is used: nothing leads from a network further out to one further in, neither
// a redirect nor a name that means another address by now. A proxy connects
// for itself: there only what the URL itself says is compared.
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
	"strings"
	"sync"
	"syscall"

	"github.com/overwire/overwire/gosrc/fault"
)

// Most is how many redirects of one request are followed.
const Most = 5

// Refused is a redirect that is not followed. It is fault.ErrPermission.
type Refused struct{ What string }

func (r *Refused) Error() string {
	return fmt.Sprintf("%v: %s is refused", fault.ErrPermission, r.What)
}
func (r *Refused) Unwrap() error { return fault.ErrPermission }

// A Hop is one request of a chain.
type Hop struct {
	URL *url.URL // without user, password and fragment
	// Home says that the chain has never left the origin: what the caller gave
	// goes along.
	Home bool

	origin string
	count  int
}

// Start is the request for the URL that the caller named.
func Start(u *url.URL) Hop { return Hop{URL: bare(u), Home: true, origin: Origin(u)} }

// Here is a new chain from where this one ended.
func (h Hop) Here() Hop {
	h.count = 0
	return h
}

// Next is where a redirect's Location leads. An error is Refused, or has no
// class: then the server may have another answer next time.
func (h Hop) Next(location string) (Hop, error) {
	to, err := h.URL.Parse(location)
	switch {
	case err != nil || location == "":
		return Hop{}, fmt.Errorf("a redirect to nowhere")
	case to.Scheme != "http" && to.Scheme != "https":
		return Hop{}, &Refused{"a redirect to another scheme"}
	case !named(to.Hostname()) || to.Opaque != "":
		return Hop{}, fmt.Errorf("a redirect to nowhere")
	case h.URL.Scheme == "https" && to.Scheme == "http":
		return Hop{}, &Refused{"a redirect from https to http"}
	case h.count == Most:
		return Hop{}, fmt.Errorf("more than %d redirects", Most)
	}
	return Hop{URL: bare(to), Home: h.Home && Origin(to) == h.origin, origin: h.origin, count: h.count + 1}, nil
}

// Redirect reports whether a status has a Location to follow.
func Redirect(status int) bool {
	switch status {
	case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
		return true
	}
	return false
}

// Origin is a URL's scheme, host and port.
func Origin(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[strings.ToLower(u.Scheme)]
	}
	return strings.ToLower(u.Scheme) + "://" + net.JoinHostPort(strings.ToLower(u.Hostname()), port)
}

// named reports whether a host is a name, or an address as it is usually
// written. Other ways of writing one (127.1, 0x7f000001, digits beyond ASCII)
// mean what the one that connects makes of them, which may be a proxy.
func named(host string) bool {
	if _, err := netip.ParseAddr(host); err == nil {
		return true
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	last := host[strings.LastIndexByte(host, '.')+1:]
	return last != "" && strings.Trim(last, "0123456789") != "" && !strings.HasPrefix(last, "0x") &&
		!strings.ContainsFunc(host, func(r rune) bool { return r <= ' ' || r >= 0x7f })
}

func bare(u *url.URL) *url.URL {
	c := *u
	c.User, c.Fragment, c.RawFragment = nil, "", ""
	return &c
}

// A Way is all requests for one object: the address at which it was found
// first decides which others may be connected to. It is safe for concurrent
// use; the zero value has not begun.
type Way struct {
	mu     sync.Mutex
	begun  bool
	origin netip.Addr // the zero address is the internet
}

type wayKey struct{}

// begin sets where the way begins, unless that is known, and refuses an
// address that is further in.
func (w *Way) begin(at netip.Addr) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.begun {
		w.begun, w.origin = true, at
	}
	return inward(w.origin, at)
}

// may refuses an address that is further in than where the way begins.
func (w *Way) may(at netip.Addr) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.begun {
		return nil
	}
	return inward(w.origin, at)
}

// inward refuses the way from a network further out to one further in: from
// the internet into a private network or this machine, from anywhere to the
// link, where clouds keep their credentials.
func inward(from, to netip.Addr) error {
	if from.Unmap() == to.Unmap() {
		return nil
	}
	out, _ := depth(from)
	if _, in := depth(to); in > out {
		return &Refused{"a redirect into a private network"}
	}
	return nil
}

// control is the hook of the dialer: the address is the one that is connected
// to, after the name was looked up.
func control(ctx context.Context, _, address string, _ syscall.RawConn) error {
	w, _ := ctx.Value(wayKey{}).(*Way)
	at, err := netip.ParseAddrPort(address)
	if w == nil || err != nil {
		return nil
	}
	return w.may(at.Addr())
}

// Send sends one request of the way by a client, and returns the connection
// that it went out on. It follows nothing.
func (w *Way) Send(c *Client, r *http.Request) (*http.Response, net.Conn, error) {
	proxy, err := c.Proxy(r)
	if err != nil {
		return nil, nil, err
	}
	ctx := r.Context()
	if proxy != nil {
		// What a proxy connects to it decides itself. An address in the URL
		// is known all the same.
		err = w.begin(literal(r.URL.Hostname()))
	} else {
		ctx = context.WithValue(ctx, wayKey{}, w)
	}
	if err != nil {
		return nil, nil, err
	}
	var mu sync.Mutex
	var conn net.Conn
	var refused error
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) {
		mu.Lock()
		defer mu.Unlock()
		conn = i.Conn
		if proxy != nil {
			return
		}
		// Another object may have dialled this one. A connection that is closed
		// sends nothing; the transport then dials, which control refuses.
		at, err := netip.ParseAddrPort(i.Conn.RemoteAddr().String())
		if err == nil {
			err = w.begin(at.Addr())
		}
		if err != nil {
			refused = err
			Cut(i.Conn)
		}
	}})
	resp, err := c.RoundTrip(r.WithContext(ctx))
	mu.Lock()
	defer mu.Unlock()
	if refused != nil {
		if err == nil {
			_ = resp.Body.Close()
		}
		return nil, nil, refused
	}
	return resp, conn, err
}

// Cut ends a connection at once, below TLS if there is any.
func Cut(conn net.Conn) {
	if secure, ok := conn.(*tls.Conn); ok {
		conn = secure.NetConn()
	}
	if c, ok := conn.(interface{ SetLinger(int) error }); ok {
		_ = c.SetLinger(0) // a reset: what is on its way need not come
	}
	_ = conn.Close()
}
