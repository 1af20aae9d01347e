// Package s3 reads and writes objects in Amazon S3 and compatible stores: s3://bucket/key, and
// s3://bucket/key?versionId=ID.
//
// Opening an object fixes its state: every later request requires the same ETag, and an object that was replaced gives
// errs.ErrCorrupt. If the store sends neither an ETag nor a date, or does not support ranges, the object is read by one
// request. Credentials, region and endpoint come from the storage options, then from Python's environment, then from
// the configuration files of AWS's own tools. Errors contain bucket, key, status and request id, but no secrets. Drafts
// are streamed in parts and become visible atomically.
package s3

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awsmiddleware "github.com/aws/aws-sdk-go-v2/aws/middleware"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go/middleware"
	smithyhttp "github.com/aws/smithy-go/transport/http"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/retry"
	"github.com/overwire/overwire/gosrc/source/route"
	"github.com/overwire/overwire/gosrc/source/spool"
)

type name struct {
	uri, bucket, key string
	version          *string
}

// parseURI splits a URI. Keys are used literally, without escapes.
func parseURI(uri string) (name, error) {
	scheme, rest, ok := strings.Cut(uri, "://")
	n := name{uri: uri}
	if !ok || !strings.EqualFold(scheme, "s3") {
		return n, n.placeError("open", errs.New(errs.ErrArgument, "expected s3://bucket/key"))
	}
	n.bucket, n.key, _ = strings.Cut(rest, "/")
	if k, id, ok := strings.Cut(n.key, "?versionId="); ok {
		n.key, n.version = k, &id
	}
	if n.bucket == "" || strings.ContainsAny(n.bucket, "@:?# \\") || strings.ContainsRune(uri, 0) {
		return n, n.placeError("open", errs.New(errs.ErrArgument,
			"expected s3://bucket/key: put credentials into storage_options"))
	}
	return n, nil
}

// parseObject is parseURI for a URI that must have a key.
func parseObject(verb, uri string) (name, error) {
	n, err := parseURI(uri)
	if err == nil && (n.key == "" || strings.HasSuffix(n.key, "/")) {
		err = n.placeError(verb, errs.New(errs.ErrArgument, "this is a folder: expected an object, s3://bucket/key"))
	}
	return n, err
}

func (n name) placeError(verb string, err error) error { return errs.Place(verb, n.uri, "", -1, err) }

// Open opens an object with one request, which also reads its beginning.
func Open(ctx context.Context, uri string, opt source.Options) (source.Source, error) {
	n, err := parseObject("open", uri)
	if err != nil {
		return nil, err
	}
	c, err := acquireClient(ctx, opt)
	if err != nil {
		return nil, n.placeError("open", err)
	}
	f := &fetcher{name: n, client: c}
	o := c.retry
	err = retry.Do(ctx, c.retry, c.judge, func(ctx context.Context) (err error) {
		o.Head, err = f.readFirst(ctx)
		return err
	})
	if err == nil && f.inOrder {
		var s source.Source
		if s, err = spool.Open(ctx, &whole{f}, c.retry, opt.Outline); err == nil {
			return s, nil
		}
	}
	if err != nil {
		c.releaseClient()
		return nil, n.placeError("open", err)
	}
	o.Host, o.Range = c.endpoint+"/"+n.bucket, retry.RangeBytes
	if f.etag != nil {
		o.Pin = *f.etag
	}
	return retry.New(f, o), nil
}

// A fetcher opens ranges of one object. It implements retry.Fetcher.
type fetcher struct {
	name
	client *client
	size   int64
	etag   *string    // identifies the object's state; nil if the store sends none
	since  *time.Time // identifies the state if there is no ETag: the time of the last change

	inOrder bool // the store sends neither an ETag nor a date, or does not support ranges
}

// readFirst reads the beginning of the object, its size and its ETag, or determines that the object can only be
// read in order.
func (o *fetcher) readFirst(ctx context.Context) ([]byte, error) {
	out, err := o.getRange(ctx, bytesOf(0, source.HeadBytes))
	if r, ok := errors.AsType[*refusal](err); ok && r.status == http.StatusRequestedRangeNotSatisfiable {
		return nil, o.checkEmpty(ctx)
	}
	if err != nil {
		return nil, err
	}
	defer out.Body.Close()
	if e := encodingOf(out); e != "" {
		return nil, encodedError(e)
	}
	o.pinObject(out.ETag, out.LastModified, out.ResultMetadata)
	if o.etag == nil && o.since == nil || out.ContentRange == nil &&
		(out.ContentLength == nil || *out.ContentLength > source.HeadBytes) {
		o.inOrder = true
		return nil, nil
	}
	lo, n, size, err := contentRange(out)
	if err != nil {
		return nil, err
	}
	if lo != 0 {
		return nil, errs.New(errs.ErrIO, "the store's response does not begin at the start of the object")
	}
	if n != min(size, source.HeadBytes) && n != size {
		return nil, errs.New(errs.ErrIO, "the store returned %d bytes of %d, expected %d", n, size, source.HeadBytes)
	}
	o.size = size
	head := make([]byte, min(size, source.HeadBytes))
	if _, err := io.ReadFull(out.Body, head); err != nil {
		return nil, classifyError(ctx, err)
	}
	return head, nil
}

// checkEmpty checks that an object is empty. No range of an empty object can be requested.
func (o *fetcher) checkEmpty(ctx context.Context) error {
	out, err := callOnce(ctx, o.client, o.bucket, func(api *s3.Client) (*s3.HeadObjectOutput, error) {
		return api.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &o.bucket, Key: &o.key, VersionId: o.version,
			SSECustomerAlgorithm: o.client.sse.algorithm, SSECustomerKey: o.client.sse.key,
			SSECustomerKeyMD5: o.client.sse.sum})
	})
	if err != nil {
		return o.client.explainKey(classifyError(ctx, err))
	}
	if out.ContentLength == nil || *out.ContentLength != 0 {
		return errs.New(errs.ErrIO, "the store does not support ranges for this object")
	}
	o.pinObject(out.ETag, out.LastModified, out.ResultMetadata)
	return nil
}

// pinObject records what identifies the object's state. Dates have a resolution of one second, so a date only
// identifies the state if that second had passed when the store responded.
func (o *fetcher) pinObject(etag *string, changed *time.Time, answer middleware.Metadata) {
	now, ok := awsmiddleware.GetServerTime(answer)
	if !ok {
		now = time.Now()
	}
	if etag != nil && *etag != "" {
		o.etag = etag
	} else if changed != nil && now.Sub(*changed) >= time.Second {
		o.since = changed
	}
}

// isSame reports whether a response is from the state that was opened. The check is necessary because some
// stores ignore conditions.
func (o *fetcher) isSame(out *s3.GetObjectOutput) bool {
	if o.etag != nil {
		return out.ETag != nil && *out.ETag == *o.etag
	}
	return o.since == nil || out.LastModified != nil && out.LastModified.Equal(*o.since)
}

func bytesOf(off, n int64) *string { return aws.String(fmt.Sprintf("bytes=%d-%d", off, off+n-1)) }

// getRange requests a range, or the whole object if want is nil. The request is conditional if the object's
// state is known.
func (o *fetcher) getRange(ctx context.Context, want *string) (*s3.GetObjectOutput, error) {
	out, err := callOnce(ctx, o.client, o.bucket, func(api *s3.Client) (*s3.GetObjectOutput, error) {
		return api.GetObject(ctx, &s3.GetObjectInput{Bucket: &o.bucket, Key: &o.key, VersionId: o.version, Range: want,
			IfMatch: o.etag, IfUnmodifiedSince: o.since,
			SSECustomerAlgorithm: o.client.sse.algorithm, SSECustomerKey: o.client.sse.key,
			SSECustomerKeyMD5: o.client.sse.sum})
	})
	if err != nil {
		err = o.client.explainKey(classifyError(ctx, err))
		if (o.etag != nil || o.since != nil) && errors.Is(err, errs.ErrNotFound) {
			err = errs.New(errs.ErrCorrupt, "the object was deleted while it was read")
		}
		return nil, err
	}
	return out, nil
}

// contentRange returns which range a response contains: bytes [lo, lo+n) of size.
func contentRange(out *s3.GetObjectOutput) (lo, n, size int64, err error) {
	bad := errs.New(errs.ErrIO, "the store's response does not state which range it contains")
	if e := encodingOf(out); e != "" {
		return 0, 0, 0, encodedError(e)
	}
	if out.ContentLength == nil {
		return 0, 0, 0, bad
	}
	n = *out.ContentLength
	if out.ContentRange == nil {
		return 0, n, n, nil
	}
	lo, hi, size, ok := route.ContentRange(*out.ContentRange)
	if !ok || size < 0 || hi < lo || hi-lo+1 != n {
		return 0, 0, 0, bad
	}
	return lo, n, size, nil
}

// encodingOf returns the first content encoding that changes the bytes of a response, or "". It uses the raw response,
// because the SDK ignores all Content-Encoding headers after the first.
func encodingOf(out *s3.GetObjectOutput) string {
	if resp, ok := awsmiddleware.GetRawResponse(out.ResultMetadata).(*smithyhttp.Response); ok {
		return route.Encoding(resp.Header)
	}
	return route.Encoding(http.Header{"Content-Encoding": {aws.ToString(out.ContentEncoding)}})
}

func encodedError(name string) error {
	return errs.New(errs.ErrNotSupported, "the object has the content encoding %q", name)
}

// A whole is an object that is read by one request. It implements spool.Whole.
type whole struct{ *fetcher }

// Whole requests the whole object; see spool.Whole.
func (w *whole) Whole(ctx context.Context) (io.ReadCloser, int64, error) {
	out, err := w.getRange(ctx, nil)
	if err != nil {
		return nil, 0, err
	}
	switch e := encodingOf(out); {
	case e != "":
		err = encodedError(e)
	case out.ContentRange != nil:
		err = errs.New(errs.ErrIO, "the store returned a range, but the whole object was requested")
	case !w.isSame(out):
		err = errs.New(errs.ErrCorrupt, "the object was changed while it was read")
	}
	if err != nil {
		_ = out.Body.Close()
		return nil, 0, err
	}
	if out.ContentLength == nil {
		return out.Body, -1, nil
	}
	return out.Body, *out.ContentLength, nil
}

// Judge permits a retry after a broken body.
func (w *whole) Judge(err error) (retry.Verdict, time.Duration) {
	if !errs.Classed(err) {
		return retry.Again, 0
	}
	return w.fetcher.Judge(err)
}

// URI returns the name as the caller passed it.
func (o *fetcher) URI() string { return o.uri }

// Size returns the object's size when it was opened.
func (o *fetcher) Size() int64 { return o.size }

// Fetch requests n bytes from off.
func (o *fetcher) Fetch(ctx context.Context, off, n int64) (io.ReadCloser, error) {
	out, err := o.getRange(ctx, bytesOf(off, n))
	if err != nil {
		return nil, err
	}
	lo, count, size, err := contentRange(out)
	switch {
	case err != nil:
	case size != o.size || !o.isSame(out):
		err = errs.New(errs.ErrCorrupt, "the object was changed while it was read")
	case lo != off || count != n:
		err = errs.New(errs.ErrIO, "bytes %d to %d were requested, but the store returned %d to %d",
			off, off+n, lo, lo+count)
	}
	if err != nil {
		_ = out.Body.Close()
		return nil, err
	}
	return out.Body, nil
}

// Judge classifies an error; see retry.Fetcher.
func (o *fetcher) Judge(err error) (retry.Verdict, time.Duration) { return o.client.judge(err) }

// Close releases the client.
func (o *fetcher) Close() error {
	o.client.releaseClient()
	return nil
}
