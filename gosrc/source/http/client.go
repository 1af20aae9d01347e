package http

// This file shares connections among sources and reads the HTTP options.

import (
	"maps"
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
