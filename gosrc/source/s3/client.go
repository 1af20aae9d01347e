package s3

// This file makes and shares clients of S3: connections, credentials, regions.

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go/logging"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/route"
)

// A client reaches stores with one set of options: connections, credentials, and
// the regions of buckets as they become known. Equal options share one.
type client struct {
	*settings
	transport *route.Client
	creds     aws.CredentialsProvider // nil: unsigned
	heard     atomic.Bool             // the store has responded once
	guessed   bool                    // nothing names creds: they are the machine's, if it has any

	mu      sync.Mutex
	refs    int
	apis    map[clientKey]*s3.Client
	regions map[string]string // of buckets outside the configured region
	bare    bool              // guessed, and the machine has none: requests go unsigned
}

// A clientKey says what one of the SDK's clients is for.
type clientKey struct {
	region string
	signed bool
}

// clients keeps what is expensive to find out (credentials, regions) for later
// calls with the same options. Connections are closed when no one uses them.
var clients struct {
	sync.Mutex
	all map[string]*client
}

const maxClients = 64

// acquireClient returns the client of these options; release ends its use.
func acquireClient(ctx context.Context, opt source.Options) (*client, error) {
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
	c, err := newClient(ctx, opt)
	if err != nil {
		return nil, err
	}
	clients.Lock()
	defer clients.Unlock()
	if first := clients.all[key]; first != nil {
		first.holdClient()
		return first, nil
	}
	if clients.all == nil || len(clients.all) >= maxClients {
		clients.all = map[string]*client{}
	}
	clients.all[key] = c
	c.holdClient()
	return c, nil
}

func (c *client) holdClient() {
	c.mu.Lock()
	c.refs++
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
	c := &client{settings: s, transport: s.transport(), apis: map[clientKey]*s3.Client{}, regions: map[string]string{}}
	ch := &chain{settings: s, http: bounded{c.transport}}
	c.creds, err = ch.firstProvider(ctx)
	c.guessed = ch.guessed
	return c, err
}

// transport makes connections. It follows no redirect: a request is signed for one
// host, and carries the session's token and the customer's key. AWS's redirect to a
// bucket's own region is signed anew; see call.
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

// maxAnswer is the most bytes of an answer that is no object's content: 1,000 names of a
// listing, escaped, are 4 MB. The library reads them all before it parses them.
const maxAnswer = 16 << 20

// bounded sends requests; a longer answer ends in an error.
type bounded struct{ *route.Client }

func (b bounded) Do(req *http.Request) (*http.Response, error) {
	resp, err := b.Client.Do(req)
	if err == nil && (resp.StatusCode >= 300 || !strings.Contains(req.URL.RawQuery, "x-id=GetObject")) {
		resp.Body = &short{resp.Body, maxAnswer}
	}
	return resp, err
}

// short is a body of at most left bytes.
type short struct {
	io.ReadCloser
	left int64
}

func (s *short) Read(p []byte) (int, error) {
	n, err := s.ReadCloser.Read(p)
	if s.left -= int64(n); s.left < 0 {
		return 0, errs.New(errs.ErrFormat, "the store's answer has more than %d bytes", maxAnswer)
	}
	return n, err
}

// apiFor is the client for a bucket, in the region where it is known to be.
func (c *client) apiFor(bucket string, signed bool) *s3.Client {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := clientKey{c.region, signed}
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
		// Package retry does the retries; callers see the first response.
		Retryer: aws.NopRetryer{},
		// Chunks have checksums of their own, and stores other than AWS fail on
		// trailing ones.
		RequestChecksumCalculation: aws.RequestChecksumCalculationWhenRequired,
		ResponseChecksumValidation: aws.ResponseChecksumValidationWhenRequired,
		Logger:                     logging.Nop{},
		DefaultsMode:               aws.DefaultsModeStandard,
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

// isSigning reports whether requests are signed. They are not where nothing names
// credentials and the machine has none: public objects are read so.
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
	_, err := c.creds.Retrieve(ctx) // the provider caches them
	if err == nil || ctx.Err() != nil {
		return true
	}
	c.mu.Lock()
	c.bare = true
	c.mu.Unlock()
	return false
}

// callOnce sends one request, and again, signed anew, if the store says that the bucket
// is in another region. Only the name of a region is taken from that response,
// never its Location.
func callOnce[T any](ctx context.Context, c *client, bucket string, fn func(*s3.Client) (T, error)) (T, error) {
	isSigned := c.isSigning(ctx)
	api := c.apiFor(bucket, isSigned)
	out, err := fn(api)
	if err == nil || ctx.Err() != nil {
		return out, err
	}
	var resp *awshttp.ResponseError
	if !errors.As(err, &resp) || resp.Response == nil || resp.Response.Response == nil {
		return out, err
	}
	region := resp.Response.Header.Get("X-Amz-Bucket-Region")
	switch s := resp.HTTPStatusCode(); {
	case (route.Redirect(s) || s == http.StatusBadRequest || s == http.StatusForbidden) &&
		region != api.Options().Region && validRegion(region):
		c.mu.Lock()
		c.regions[bucket] = region
		c.mu.Unlock()
		return fn(c.apiFor(bucket, isSigned))
	case !isSigned && (s == http.StatusUnauthorized || s == http.StatusForbidden):
		c.mu.Lock()
		c.bare = false // there may be some next time
		c.mu.Unlock()
		return out, lackCredentials("%s. Unsigned, the store refused%s", noCredentials, statusOf(err))
	}
	return out, err
}
