package http

// This file sends requests and follows redirects.

import (
	"context"
	"io"
	"maps"
	"net"
	"net/http"

	"github.com/overwire/overwire/gosrc/source/route"
)

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
