package http

// This file shares connections among sources, reads the HTTP options, sends requests and follows redirects.

import (
	"context"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/route"
)

// A client holds the connections of all sources with the same options, such as the shards of a model.
type client struct {
	key       string
	refs      int
	transport *route.Client
}

var (
	clientsMu sync.Mutex
	clients   = map[string]*client{}
)

// holdClient returns the client for these options and adds a reference.
func holdClient(opt source.Options) (*client, error) {
	key := opt.Whole()
	clientsMu.Lock()
	defer clientsMu.Unlock()
	if c := clients[key]; c != nil {
		c.refs++
		return c, nil
	}
	t, err := newTransport(opt)
	if err != nil {
		return nil, err
	}
	c := &client{key: key, refs: 1, transport: t}
	clients[key] = c
	return c, nil
}

// dropClient removes a reference. When none is left, it closes the idle connections.
func (c *client) dropClient() {
	clientsMu.Lock()
	defer clientsMu.Unlock()
	if c.refs--; c.refs == 0 {
		delete(clients, c.key)
		c.transport.CloseIdleConnections()
	}
}

// newTransport returns a transport that trusts the CA certificates from the options, or else those from the
// environment.
func newTransport(opt source.Options) (*route.Client, error) {
	insecure, err := opt.Flag("insecure")
	if err != nil {
		return nil, err
	}
	trust := route.Named(opt.Storage["cacert"], opt.Storage["capath"], opt.Env)
	c := route.New(route.Settings{Env: opt.Env, Trust: trust, Insecure: insecure, Dial: 10 * time.Second})
	c.TLSHandshakeTimeout = 15 * time.Second
	c.MaxIdleConnsPerHost = 1024
	c.MaxResponseHeaderBytes = 256 << 10
	return c, nil
}

// headersOf returns the caller's headers, including the token. They are sent only to the origin that the user
// named; see package route.
func headersOf(opt source.Options) (http.Header, error) {
	h := http.Header{}
	for _, k := range slices.Sorted(maps.Keys(opt.Storage)) {
		name, ok := strings.CutPrefix(k, source.HeaderPrefix)
		if !ok {
			continue
		}
		if !isToken(name) || strings.ContainsAny(opt.Storage[k], "\r\n\x00") {
			return nil, errs.New(errs.ErrArgument,
				"storage_options: headers: %q: expected a valid name and a value without line breaks", name)
		}
		switch http.CanonicalHeaderKey(name) {
		case "Range", "If-Match", "If-None-Match", "If-Range", "If-Modified-Since", "If-Unmodified-Since",
			"Accept-Encoding", "Content-Length",
			"Transfer-Encoding", "Connection", "Keep-Alive", "Te", "Trailer", "Upgrade", "Expect", "Proxy-Connection":
			return nil, errs.New(errs.ErrArgument,
				"storage_options: headers: %q cannot be set: overwire sets it itself", name)
		case "Proxy-Authorization": // would be forwarded to any server
			return nil, errs.New(errs.ErrArgument,
				"storage_options: headers: %q cannot be set: put the proxy's user and password into its URL in "+
					"the environment", name)
		}
		h.Set(name, opt.Storage[k])
	}
	if t := strings.TrimSpace(opt.Storage["token"]); t != "" && h.Get("Authorization") == "" {
		if strings.ContainsAny(t, "\r\n\x00") {
			return nil, errs.New(errs.ErrArgument, "storage_options: token: expected a value without line breaks")
		}
		h.Set("Authorization", "Bearer "+t)
	}
	return h, nil
}

func isToken(name string) bool {
	return name != "" && !strings.ContainsFunc(name, func(r rune) bool {
		return r <= ' ' || r >= 0x7f || strings.ContainsRune(`()<>@,;:\"/[]?={}`, r)
	})
}

// getObject sends a request for the object and follows redirects. Later requests go directly to the server that
// returned the first response.
func (o *object) getObject(ctx context.Context, extra http.Header) (*http.Response, error) {
	o.mu.Lock()
	at := o.moved
	o.mu.Unlock()
	if at != nil {
		resp, err := o.followHops(ctx, at.Here(), extra)
		if err != nil {
			return nil, err
		}
		switch resp.StatusCode {
		case http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound, http.StatusGone:
			// The signed URL may have expired: ask the first server for a new one.
			_ = resp.Body.Close()
			o.mu.Lock()
			o.moved = nil
			o.mu.Unlock()
		default:
			return resp, nil
		}
	}
	return o.followHops(ctx, route.Start(o.homeURL()), extra)
}

func (o *object) followHops(ctx context.Context, h route.Hop, extra http.Header) (*http.Response, error) {
	for hops := 0; ; hops++ {
		resp, err := o.sendHop(ctx, h, extra)
		if err != nil {
			return nil, err
		}
		if h.Home && o.revision != nil {
			if err := o.revision.takeCommit(resp); err != nil {
				_ = resp.Body.Close()
				return nil, err
			}
			o.takeSum(resp)
		}
		if !route.Redirect(resp.StatusCode) {
			if hops > 0 && resp.StatusCode == http.StatusPartialContent {
				o.mu.Lock()
				o.moved = &h
				o.mu.Unlock()
			}
			return resp, nil
		}
		_, _ = io.CopyN(io.Discard, resp.Body, 4<<10) // read short bodies to the end to reuse the connection
		_ = resp.Body.Close()
		if h, err = h.Next(resp.Header.Get("Location")); err != nil {
			return nil, err
		}
	}
}

func (o *object) sendHop(ctx context.Context, h route.Hop, extra http.Header) (*http.Response, error) {
	req := (&http.Request{Method: http.MethodGet, URL: h.URL, Host: h.URL.Host, Proto: "HTTP/1.1", ProtoMajor: 1,
		ProtoMinor: 1, Header: http.Header{}})
	if h.Home {
		maps.Copy(req.Header, o.headers)
		if host := req.Header.Get("Host"); host != "" {
			req.Host = host
			req.Header.Del("Host")
		}
		if p := o.url.User; p != nil && req.Header.Get("Authorization") == "" {
			word, _ := p.Password()
			req.SetBasicAuth(p.Username(), word)
		}
	}
	maps.Copy(req.Header, extra)
	req.Header.Set("Accept-Encoding", "identity")
	if req.Header.Get("User-Agent") == "" {
		req.Header.Set("User-Agent", "overwire")
	}
	resp, conn, err := o.way.Send(o.client.transport, req.WithContext(ctx))
	if err == nil && conn != nil && resp.Body != http.NoBody {
		resp.Body = &body{ReadCloser: resp.Body, conn: conn}
	}
	return resp, err
}

// A body resets its connection if it is closed before its end. Otherwise closing would wait for locks of the
// transport and for TLS's close message, while the rest of the body keeps arriving.
type body struct {
	io.ReadCloser
	conn net.Conn
	end  bool
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.end = b.end || err == io.EOF
	return n, err
}

func (b *body) Close() error {
	if !b.end {
		route.Cut(b.conn)
	}
	return b.ReadCloser.Close()
}
