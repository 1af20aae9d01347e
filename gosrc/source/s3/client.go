package s3

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go/logging"
	"golang.org/x/net/http/httpproxy"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/source"
)

// A client is one way of reaching stores: connections, credentials, and the
// regions of buckets as they became known. Equal options share one.
type client struct {
	*settings
	transport *http.Transport
	creds     aws.CredentialsProvider // nil: unsigned

	mu      sync.Mutex
	refs    int
	apis    map[string]*s3.Client // by region
	regions map[string]string     // of buckets elsewhere than settings say
}

// clients keeps what was found out at a price (credentials, regions) for later
// calls with the same options; connections it keeps only while they are used.
var clients struct {
	sync.Mutex
	all map[string]*client
}

const maxClients = 64

// acquire returns the client of some options; release ends its use.
func acquire(ctx context.Context, opt source.Options) (*client, error) {
	key := keyOf(opt)
	clients.Lock()
	c := clients.all[key]
	if c != nil {
		c.hold()
	}
	clients.Unlock()
	if c != nil {
		return c, nil
	}
	c, err := newClient(ctx, opt)
	if err != nil {
		return nil, err
	}
	clients.Lock()
	defer clients.Unlock()
	if first := clients.all[key]; first != nil {
		first.hold()
		return first, nil
	}
	if clients.all == nil || len(clients.all) >= maxClients {
		clients.all = map[string]*client{}
	}
	clients.all[key] = c
	c.hold()
	return c, nil
}

func (c *client) hold() {
	c.mu.Lock()
	c.refs++
	c.mu.Unlock()
}

func (c *client) release() {
	c.mu.Lock()
	c.refs--
	last := c.refs == 0
	c.mu.Unlock()
	if last {
		c.transport.CloseIdleConnections()
	}
}

// keyOf is the same for the same options. It holds secrets and stays here.
func keyOf(opt source.Options) string {
	var b strings.Builder
	for _, m := range []map[string]string{opt.Storage, opt.Env} {
		for _, k := range slices.Sorted(maps.Keys(m)) {
			b.WriteString(strconv.Quote(k) + "=" + strconv.Quote(m[k]) + ",")
		}
		b.WriteByte('\n')
	}
	return b.String()
}

func newClient(ctx context.Context, opt source.Options) (*client, error) {
	s, err := resolve(ctx, opt)
	if err != nil {
		return nil, err
	}
	t, err := s.transport()
	if err != nil {
		return nil, err
	}
	c := &client{settings: s, transport: t, apis: map[string]*s3.Client{}, regions: map[string]string{}}
	ch := &chain{settings: s, http: c.http()}
	c.creds, err = ch.provider(ctx)
	return c, err
}

// transport makes connections: HTTP/1.1, since one connection carries one
// stream faster than a share of one that is multiplexed.
func (s *settings) transport() (*http.Transport, error) {
	roots, err := s.roots()
	if err != nil {
		return nil, err
	}
	proxy := httpproxy.Config{
		HTTPProxy: s.either("HTTP_PROXY"), HTTPSProxy: s.either("HTTPS_PROXY"), NoProxy: s.either("NO_PROXY"),
	}
	if all := s.either("ALL_PROXY"); all != "" {
		if proxy.HTTPProxy == "" {
			proxy.HTTPProxy = all
		}
		if proxy.HTTPSProxy == "" {
			proxy.HTTPSProxy = all
		}
	}
	through := proxy.ProxyFunc()
	return &http.Transport{
		Proxy:                 func(r *http.Request) (*url.URL, error) { return through(r.URL) },
		DialContext:           (&net.Dialer{Timeout: min(s.retry.Timeout, 15*time.Second), KeepAlive: 30 * time.Second}).DialContext,
		TLSClientConfig:       &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout:   min(s.retry.Timeout, 15*time.Second),
		ResponseHeaderTimeout: s.retry.Timeout,
		ExpectContinueTimeout: time.Second,
		MaxConnsPerHost:       s.retry.Connections,
		MaxIdleConnsPerHost:   256,
		IdleConnTimeout:       30 * time.Second,
		DisableCompression:    true,
		ReadBufferSize:        256 << 10,
		WriteBufferSize:       256 << 10,
		Protocols:             http1(),
	}, nil
}

func http1() *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	return p
}

func (s *settings) either(name string) string {
	if v := s.env(name); v != "" {
		return v
	}
	return s.env(strings.ToLower(name))
}

// roots are the authorities to be trusted: nil, the system's own, unless a
// file or folder was named.
func (s *settings) roots() (*x509.CertPool, error) {
	if s.cacert == "" && s.cacerts == "" {
		return nil, nil
	}
	files := []string{s.cacert}
	if s.cacert == "" {
		files = nil
		for _, dir := range filepath.SplitList(s.cacerts) {
			found, _ := filepath.Glob(filepath.Join(dir, "*"))
			files = append(files, found...)
		}
	}
	pool, any := x509.NewCertPool(), false
	for _, f := range files {
		pem, err := os.ReadFile(f)
		if err != nil {
			if s.cacert != "" {
				return nil, &fault.At{Verb: "open", Source: f, Chunk: -1, Offset: -1, Err: fault.FromOS(err)}
			}
			continue
		}
		any = pool.AppendCertsFromPEM(pem) || any
	}
	if !any {
		return nil, fault.New(fault.ErrArgument, "no certificate in %s%s", s.cacert, s.cacerts)
	}
	return pool, nil
}

// http follows the redirects that keep the method, as AWS sends them to new
// buckets, and never out of TLS.
func (c *client) http() *http.Client {
	return &http.Client{Transport: c.transport, CheckRedirect: func(r *http.Request, via []*http.Request) error {
		status := r.Response.StatusCode
		if status != http.StatusTemporaryRedirect && status != http.StatusPermanentRedirect || len(via) > 5 {
			return http.ErrUseLastResponse
		}
		if via[0].URL.Scheme == "https" && r.URL.Scheme != "https" {
			return fault.New(fault.ErrPermission, "a redirect from https to %s is not followed", r.URL.Scheme)
		}
		return nil
	}}
}

// api is the client for a bucket, in the region where it is known to be.
func (c *client) api(bucket string) *s3.Client {
	c.mu.Lock()
	defer c.mu.Unlock()
	region := c.region
	if r, ok := c.regions[bucket]; ok {
		region = r
	}
	if a, ok := c.apis[region]; ok {
		return a
	}
	o := s3.Options{
		Region:       region,
		Credentials:  c.creds,
		HTTPClient:   c.http(),
		UsePathStyle: c.pathStyle,
		UseARNRegion: true,
		// Retries are ours; the first answer is what callers see.
		Retryer: aws.NopRetryer{},
		// Chunks have checksums of their own, and stores beside AWS stumble
		// over trailing ones.
		RequestChecksumCalculation: aws.RequestChecksumCalculationWhenRequired,
		ResponseChecksumValidation: aws.ResponseChecksumValidationWhenRequired,
		Logger:                     logging.Nop{},
		DefaultsMode:               aws.DefaultsModeStandard,
	}
	if c.creds == nil {
		o.Credentials = aws.AnonymousCredentials{}
	}
	if c.endpoint != "" {
		o.BaseEndpoint = &c.endpoint
	}
	if c.fips {
		o.EndpointOptions.UseFIPSEndpoint = aws.FIPSEndpointStateEnabled
	}
	if c.dual {
		o.EndpointOptions.UseDualStackEndpoint = aws.DualStackEndpointStateEnabled
	}
	a := s3.New(o)
	c.apis[region] = a
	return a
}

// call runs one request, and once more where the store says that the bucket is
// in another region.
func call[T any](ctx context.Context, c *client, bucket string, fn func(*s3.Client) (T, error)) (T, error) {
	api := c.api(bucket)
	out, err := fn(api)
	if err == nil || ctx.Err() != nil {
		return out, err
	}
	var resp *awshttp.ResponseError
	if !errors.As(err, &resp) || resp.Response == nil || resp.Response.Response == nil {
		return out, err
	}
	region := resp.Response.Header.Get("X-Amz-Bucket-Region")
	if s := resp.HTTPStatusCode(); s != http.StatusMovedPermanently && s != http.StatusBadRequest && s != http.StatusForbidden ||
		region == api.Options().Region || !validRegion(region) {
		return out, err
	}
	c.mu.Lock()
	c.regions[bucket] = region
	c.mu.Unlock()
	return fn(c.api(bucket))
}
