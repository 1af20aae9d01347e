package s3

// This file creates and shares S3 clients, with their connections, credentials and regions.

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go/logging"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/retry"
	"github.com/overwire/overwire/gosrc/source/route"
)

// A client accesses stores with one set of options. It holds connections, credentials, and the regions of
// buckets as far as they are known. Calls with equal options share one client.
type client struct {
	*settings
	transport *route.Client
	creds     aws.CredentialsProvider // nil means that requests are not signed
	heard     atomic.Bool             // the store has responded at least once
	guessed   bool                    // no credentials were configured; creds are those of the machine, if it has any

	mu      sync.Mutex
	refs    int
	used    time.Time // when it was last acquired
	apis    map[clientKey]*s3.Client
	regions map[string]string // maps buckets outside the configured region to their regions
	bare    bool              // guessed, but the machine has no credentials: requests are not signed
	plain   bool              // a server or proxy refuses "Expect: 100-continue"
	summed  map[string]bool   // buckets that only accept uploads with a checksum
}

// A clientKey identifies one client of the SDK.
type clientKey struct {
	region string
	signed bool
	plain  bool // send bodies without "Expect: 100-continue"
}

// clients caches clients for later calls with the same options, because credentials and regions are expensive
// to determine. Connections of unused clients are closed.
var clients struct {
	sync.Mutex
	all map[string]*client
}

const maxClients = 64

// acquireClient returns the client for these options and adds a reference, which releaseClient removes.
func acquireClient(ctx context.Context, opt source.Options) (*client, error) {
	opt, err := withOwnNames(opt)
	if err != nil {
		return nil, err
	}
	key := opt.Whole()
	clients.Lock()
	c := clients.all[key]
	if c != nil {
		c.holdClient()
	}
	clients.Unlock()
	if c != nil {
		return c, nil
	}
	c, err = newClient(ctx, opt)
	if err != nil {
		return nil, err
	}
	clients.Lock()
	defer clients.Unlock()
	if first := clients.all[key]; first != nil {
		first.holdClient()
		return first, nil
	}
	if clients.all == nil {
		clients.all = map[string]*client{}
	}
	if len(clients.all) >= maxClients {
		dropOldestClient()
	}
	clients.all[key] = c
	c.holdClient()
	return c, nil
}

// dropOldestClient removes the least recently acquired client from the cache. Its users can still use it. The
// caller has locked clients.
func dropOldestClient() {
	var oldest string
	when := time.Now()
	for key, c := range clients.all {
		c.mu.Lock()
		if c.used.Before(when) {
			oldest, when = key, c.used
		}
		c.mu.Unlock()
	}
	delete(clients.all, oldest)
}

func (c *client) holdClient() {
	c.mu.Lock()
	c.refs++
	c.used = time.Now()
	c.mu.Unlock()
}

func (c *client) releaseClient() {
	c.mu.Lock()
	c.refs--
	last := c.refs == 0
	c.mu.Unlock()
	if last {
		c.transport.CloseIdleConnections()
	}
}

func newClient(ctx context.Context, opt source.Options) (*client, error) {
	s, err := resolveSettings(ctx, opt)
	if err != nil {
		return nil, err
	}
	c := &client{settings: s, transport: s.transport(), apis: map[clientKey]*s3.Client{}, regions: map[string]string{},
		summed: map[string]bool{}}
	ch := &chain{settings: s, http: bounded{c.transport}}
	c.creds, err = ch.firstProvider(ctx)
	c.guessed = ch.guessed
	return c, err
}

// transport returns a transport that does not follow redirects: a request is signed for one host and carries
// the session token and the customer's key. AWS's redirect to a bucket's own region is handled in callOnce,
// with a new signature.
func (s *settings) transport() *route.Client {
	limit := min(s.retry.Timeout, 15*time.Second)
	c := route.New(route.Settings{Env: s.opt.Env, Trust: s.trust, Dial: limit})
	c.TLSHandshakeTimeout = limit
	c.ResponseHeaderTimeout = s.retry.Timeout
	c.ExpectContinueTimeout = time.Second
	c.MaxConnsPerHost = s.retry.Connections
	c.MaxIdleConnsPerHost = 256
	c.ReadBufferSize = 256 << 10
	c.WriteBufferSize = 256 << 10
	return c
}

// maxAnswer is the largest response without object content, in bytes. A listing of 1,000 escaped names takes 4
// MB. The library reads a response completely before it parses it.
const maxAnswer = 16 << 20

// bounded sends requests and fails if a response is too long.
type bounded struct{ *route.Client }

func (b bounded) Do(req *http.Request) (*http.Response, error) {
	resp, err := b.Client.Do(req)
	if err == nil && (resp.StatusCode >= 300 || !strings.Contains(req.URL.RawQuery, "x-id=GetObject")) {
		resp.Body = &short{resp.Body, maxAnswer}
	}
	return resp, err
}

// short is a body that fails after left bytes.
type short struct {
	io.ReadCloser
	left int64
}

func (s *short) Read(p []byte) (int, error) {
	n, err := s.ReadCloser.Read(p)
	if s.left -= int64(n); s.left < 0 {
		return 0, errs.New(errs.ErrFormat, "the store's response has more than %d bytes", maxAnswer)
	}
	return n, err
}

// apiFor returns the SDK's client for a bucket, in the bucket's region if that is known.
func (c *client) apiFor(bucket string, signed bool) *s3.Client {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := clientKey{c.region, signed, c.plain}
	if r, ok := c.regions[bucket]; ok {
		at.region = r
	}
	if a, ok := c.apis[at]; ok {
		return a
	}
	o := s3.Options{
		Region:       at.region,
		Credentials:  c.creds,
		HTTPClient:   wary{bounded{c.transport}},
		UsePathStyle: c.pathStyle,
		UseARNRegion: true,
		// Package retry does the retries. Callers see the first response.
		Retryer: aws.NopRetryer{},
		// Chunks have their own checksums, and stores other than AWS fail on trailing checksums.
		RequestChecksumCalculation: aws.RequestChecksumCalculationWhenRequired,
		ResponseChecksumValidation: aws.ResponseChecksumValidationWhenRequired,
		HTTPSignerV4:               newSigner(),
		Logger:                     logging.Nop{},
		DefaultsMode:               aws.DefaultsModeStandard,
	}
	if at.plain {
		o.ContinueHeaderThresholdBytes = -1
	}
	if c.creds == nil || !signed {
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
	c.apis[at] = a
	return a
}

// isSigning reports whether requests are signed. They are not if the user configured no credentials and the
// machine has none, which allows public objects to be read.
func (c *client) isSigning(ctx context.Context) bool {
	if !c.guessed {
		return true
	}
	c.mu.Lock()
	bare := c.bare
	c.mu.Unlock()
	if bare {
		return false
	}
	_, err := c.creds.Retrieve(ctx) // the provider caches credentials
	if err == nil || ctx.Err() != nil {
		return true
	}
	c.mu.Lock()
	c.bare = true
	c.mu.Unlock()
	return false
}

// signer signs requests without their Accept-Encoding header, because a proxy may change it, as Google's front
// end does.
type signer struct{ v4 *v4.Signer }

// newSigner returns the signer of one client. Clients do not share signers, because a signer caches derived
// keys by access key and ignores the secret.
func newSigner() signer {
	return signer{v4.NewSigner(func(o *v4.SignerOptions) { o.DisableURIPathEscaping = true })}
}

// SignHTTP signs one request.
func (s signer) SignHTTP(ctx context.Context, keys aws.Credentials, r *http.Request, hash, service, region string,
	at time.Time, options ...func(*v4.SignerOptions)) error {
	encoding := r.Header.Values("Accept-Encoding")
	r.Header.Del("Accept-Encoding")
	err := s.v4.SignHTTP(ctx, keys, r, hash, service, region, at, options...)
	if encoding != nil {
		r.Header["Accept-Encoding"] = encoding
	}
	return err
}

// callOnce sends one request. If the store says that the bucket is in another region, it signs and sends the
// request again. If "Expect: 100-continue" is refused, it sends the request without it. It uses only the
// region's name from the response, never its Location.
func callOnce[T any](ctx context.Context, c *client, bucket string, fn func(*s3.Client) (T, error)) (T, error) {
	isSigned, hasMoved := c.isSigning(ctx), false
	for {
		api := c.apiFor(bucket, isSigned)
		out, err := fn(api)
		if err == nil || ctx.Err() != nil {
			return out, err
		}
		asksFirst := api.Options().ContinueHeaderThresholdBytes >= 0
		var resp *awshttp.ResponseError
		if !errors.As(err, &resp) || resp.HTTPStatusCode() == 0 { // there was no response
			if asksFirst && isCutWrite(err) {
				c.sendPlainly()
				continue
			}
			return out, err
		}
		region := resp.Response.Header.Get("X-Amz-Bucket-Region")
		switch s := resp.HTTPStatusCode(); {
		case s == http.StatusExpectationFailed && asksFirst:
			c.sendPlainly()
		case !hasMoved && (route.Redirect(s) || s == http.StatusBadRequest || s == http.StatusForbidden) &&
			region != api.Options().Region && validRegion(region):
			hasMoved = true
			c.mu.Lock()
			c.regions[bucket] = region
			c.mu.Unlock()
		case !isSigned && (s == http.StatusUnauthorized || s == http.StatusForbidden):
			c.mu.Lock()
			c.bare = false // credentials may be available next time
			c.mu.Unlock()
			return out, lackCredentials("%s. The store refused an unsigned request%s", noCredentials, statusOf(err))
		default:
			return out, err
		}
	}
}

// sendPlainly makes later requests omit "Expect: 100-continue".
func (c *client) sendPlainly() {
	c.mu.Lock()
	c.plain = true
	c.mu.Unlock()
}

// judge discards expired credentials, so that a retry fetches new ones.
func (c *client) judge(err error) (retry.Verdict, time.Duration) {
	r, isRefusal := errors.AsType[*refusal](err)
	if cache, ok := c.creds.(*aws.CredentialsCache); ok && isRefusal &&
		slices.Contains([]string{"ExpiredToken", "TokenRefreshRequired", "InvalidToken"}, r.code) {
		cache.Invalidate()
		return retry.Busy, 0
	}
	return judgeError(err)
}

// signBody excludes the body's hash from the signature if TLS already protects the body.
func (c *client) signBody(o *s3.Options) {
	if !strings.HasPrefix(c.endpoint, "http://") {
		o.APIOptions = append(o.APIOptions, v4.SwapComputePayloadSHA256ForUnsignedPayloadMiddleware)
	}
}

// isCutWrite reports whether a connection was closed while a body was being sent. A response that refuses the
// expectation may be lost in this way, because the transport then still sends the body, to reuse the connection.
func isCutWrite(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && (op.Op == "write" || op.Op == "readfrom") &&
		(errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE))
}
