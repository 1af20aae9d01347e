package s3

// This file writes, lists, removes and presigns S3 objects.

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"slices"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awsmiddleware "github.com/aws/aws-sdk-go-v2/aws/middleware"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/parts"
	"github.com/overwire/overwire/gosrc/source/retry"
)

// Limits of a multipart upload: at most 10,000 parts, each of at least 5 MiB.
const (
	minPart  = 8 << 20
	maxParts = 10_000
	maxPart  = 5 << 30
	inFlight = 8 // parts sent in parallel, unless the storage option connections is set
)

// An upload is an object being written. It implements parts.Store.
type upload struct {
	name
	client *client

	mu       sync.Mutex
	id       *string   // id of the multipart upload; nil before it begins
	isSummed bool      // the parts have checksums
	begun    time.Time // start time by the store's clock; zero if the store does not send its time
	once     *string   // If-None-Match, so that an existing object is not replaced; nil: replace it
	done     []types.CompletedPart
	size     int64 // total size of the parts in done
	own      identity
	begin    *beginning // a request for an id whose caller was cancelled
	isCut    bool       // the caller of a part was cancelled, so the part may still arrive
}

// An identity distinguishes an object from other objects with the same name. Objects with equal bytes have equal ETags,
// but different marks.
type identity struct {
	mark string // a random text in the object's metadata, under markKey
	etag string // of the published object; "" means that the store did not send it
}

const markKey = "overwire-upload"

// A beginning is a request for the id of an upload.
type beginning struct {
	done chan struct{} // closed at the end
	out  *s3.CreateMultipartUploadOutput
	err  error
}

// markMetadata returns the metadata of the object.
func (u *upload) markMetadata() map[string]string { return map[string]string{markKey: u.own.mark} }

// Create begins an object of at most limit bytes. An existing object of this name remains until Publish. The
// caller ends the draft with Drop.
func Create(ctx context.Context, uri string, opt source.Options, limit int64) (source.Draft, error) {
	n, err := parseObject("save", uri)
	if err != nil {
		return nil, err
	}
	if n.version != nil {
		return nil, n.placeError("save", errs.New(errs.ErrArgument,
			"cannot write to a version of an object: omit ?versionId="))
	}
	part := int64(minPart)
	if most := int64(maxParts * 9 / 10); limit > part*most {
		part = (limit/most | (1<<20 - 1)) + 1
	}
	if part > maxPart {
		return nil, n.placeError("save", errs.New(errs.ErrArgument,
			"%d bytes do not fit into one object: write several shards", limit))
	}
	c, err := acquireClient(ctx, opt)
	if err != nil {
		return nil, n.placeError("save", err)
	}
	u := &upload{name: n, client: c, isSummed: c.sendsSums(n.bucket), own: identity{mark: rand.Text()}}
	if opt.Once {
		u.once = aws.String("*")
	}
	return parts.New(ctx, u, part, cmp.Or(c.retry.Connections, inFlight)), nil
}

func (u *upload) URI() string { return u.uri }

// Part sends one part. The first part begins the upload.
func (u *upload) Part(ctx context.Context, k int, p [][]byte) error {
	for {
		id, isSummed, err := u.beginUpload(ctx)
		if err != nil {
			return u.placeError("save", err)
		}
		done, err := u.sendPart(ctx, id, int32(k+1), p, checksumOf(p, isSummed))
		switch {
		case err == nil:
			u.mu.Lock()
			defer u.mu.Unlock()
			u.done = append(u.done, done)
			u.size += sizeOf(p)
			if isSummed {
				u.client.noteSums(u.bucket)
			}
			return nil
		case !u.beginAnew(ctx, id, err):
			return u.placeError("save", err)
		}
	}
}

func (u *upload) sendPart(ctx context.Context, id *string, number int32, p [][]byte, sum *string) (types.CompletedPart,
	error) {
	size := sizeOf(p)
	out, err := callWithRetries(ctx, u.client, u.bucket,
		func(ctx context.Context, api *s3.Client) (*s3.UploadPartOutput, error) {
			out, err := api.UploadPart(ctx, &s3.UploadPartInput{Bucket: &u.bucket, Key: &u.key, UploadId: id,
				PartNumber: &number, ChecksumAlgorithm: algorithmOf(sum != nil), ChecksumCRC32C: sum,
				Body: bodyOf(ctx, p), ContentLength: &size,
				SSECustomerAlgorithm: u.client.sse.algorithm, SSECustomerKey: u.client.sse.key,
				SSECustomerKeyMD5: u.client.sse.sum}, u.client.signBody)
			if err == nil {
				err = u.client.confirmKey(out.SSECustomerAlgorithm, out.SSECustomerKeyMD5, out.ResultMetadata)
			}
			if err == nil && !isNamed(out.ETag) {
				err = errs.New(errs.ErrIO, "the store's response to part %d has no ETag", number)
			}
			return out, err
		})
	if err != nil {
		u.mu.Lock()
		u.isCut = u.isCut || ctx.Err() != nil
		u.mu.Unlock()
		return types.CompletedPart{}, err
	}
	return types.CompletedPart{PartNumber: &number, ETag: out.ETag, ChecksumCRC32C: sum}, nil
}

func (u *upload) beginUpload(ctx context.Context) (id *string, isSummed bool, err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.id != nil {
		return u.id, u.isSummed, nil
	}
	if u.begin != nil { // the save was cancelled
		return nil, false, errs.FromOS(context.Cause(ctx))
	}
	b := u.requestID(context.WithoutCancel(ctx), u.isSummed)
	select {
	case <-b.done:
	case <-ctx.Done():
		u.begin = b
		return nil, false, errs.FromOS(context.Cause(ctx))
	}
	if b.err != nil {
		return nil, false, b.err
	}
	out := b.out
	if !isNamed(out.UploadId) {
		return nil, false, errs.New(errs.ErrIO, "the store returned no upload id")
	}
	u.id = out.UploadId
	u.begun, _ = awsmiddleware.GetServerTime(out.ResultMetadata)
	return u.id, u.isSummed, nil
}

// requestID requests the id of an upload. Only the response has the id with which Abort removes the upload, so the
// request goes on if the save is cancelled.
func (u *upload) requestID(ctx context.Context, isSummed bool) *beginning {
	b := &beginning{done: make(chan struct{})}
	spawn.Go("source.begin", func() {
		defer close(b.done)
		b.out, b.err = callWithRetries(ctx, u.client, u.bucket,
			func(ctx context.Context, api *s3.Client) (*s3.CreateMultipartUploadOutput, error) {
				return api.CreateMultipartUpload(ctx, &s3.CreateMultipartUploadInput{Bucket: &u.bucket, Key: &u.key,
					ChecksumAlgorithm: algorithmOf(isSummed), Metadata: u.markMetadata(),
					SSECustomerAlgorithm: u.client.sse.algorithm, SSECustomerKey: u.client.sse.key,
					SSECustomerKeyMD5: u.client.sse.sum})
			})
	})
	return b
}

// Publish completes the upload, or writes a small object as a whole. It succeeds only if the store's response
// has an ETag, or if a later request finds the object.
func (u *upload) Publish(ctx context.Context, n int, whole []byte) error {
	if n == 0 {
		var err error
		if n, err = u.publishWithKey(ctx, whole); err != nil {
			return err
		}
	}
	if n == 0 {
		return u.endPublished(u.putObject(ctx, whole))
	}
	if len(u.done) != n {
		return u.placeError("save", errs.New(errs.ErrEngine, "only %d of %d parts were sent", len(u.done), n))
	}
	sort.Slice(u.done, func(i, k int) bool { return *u.done[i].PartNumber < *u.done[k].PartNumber })
	tries := 0
	_, err := callWithRetries(ctx, u.client, u.bucket,
		func(ctx context.Context, api *s3.Client) (*s3.CompleteMultipartUploadOutput, error) {
			tries++
			out, err := api.CompleteMultipartUpload(ctx, &s3.CompleteMultipartUploadInput{
				Bucket: &u.bucket, Key: &u.key, UploadId: u.id, IfNoneMatch: u.once,
				MultipartUpload:      &types.CompletedMultipartUpload{Parts: u.done},
				SSECustomerAlgorithm: u.client.sse.algorithm,
				SSECustomerKey:       u.client.sse.key, SSECustomerKeyMD5: u.client.sse.sum})
			switch {
			case err == nil && isNamed(out.ETag):
				u.own.etag = *out.ETag
				return out, nil
			case u.refusedOnce(err):
				return nil, u.notOnce(err, tries, func() error { return u.confirmUpload(ctx, api) })
			case !isUnclear(err, tries):
				return out, err
			}
			return nil, u.confirmUpload(ctx, api)
		})
	return u.endPublished(err)
}

func (u *upload) putObject(ctx context.Context, whole []byte) error {
	size, tries, all := int64(len(whole)), 0, [][]byte{whole}
	_, err := callWithRetries(ctx, u.client, u.bucket,
		func(ctx context.Context, api *s3.Client) (*s3.PutObjectOutput, error) {
			tries++
			in := &s3.PutObjectInput{Bucket: &u.bucket, Key: &u.key, Body: bodyOf(ctx, all),
				ChecksumAlgorithm: algorithmOf(u.isSummed), ChecksumCRC32C: checksumOf(all, u.isSummed),
				ContentLength: &size, IfNoneMatch: u.once, Metadata: u.markMetadata(),
				SSECustomerAlgorithm: u.client.sse.algorithm, SSECustomerKey: u.client.sse.key,
				SSECustomerKeyMD5: u.client.sse.sum}
			out, err := api.PutObject(ctx, in, u.client.signBody)
			if err != nil && !u.isSummed && mayWantSum(ctx, err) {
				in.Body, in.ChecksumAlgorithm = bodyOf(ctx, all), algorithmOf(true)
				in.ChecksumCRC32C = checksumOf(all, true)
				if out, err = api.PutObject(ctx, in, u.client.signBody); err == nil {
					u.client.noteSums(u.bucket)
				}
			}
			if err == nil {
				u.own.etag = aws.ToString(out.ETag)
				why := u.client.confirmKey(out.SSECustomerAlgorithm, out.SSECustomerKeyMD5, out.ResultMetadata)
				if why != nil {
					return out, u.removeUnencrypted(ctx, api, why)
				}
			}
			if err == nil && !isNamed(out.ETag) {
				err = u.compareObject(ctx, api, whole)
			}
			if u.refusedOnce(err) {
				err = u.notOnce(err, tries, func() error { return u.compareObject(ctx, api, whole) })
			}
			return out, err
		})
	return err
}

// isPublished reports whether the store has the object although Publish did not get an answer that says so.
func (u *upload) isPublished() bool {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	out, err := callWithRetries(ctx, u.client, u.bucket,
		func(ctx context.Context, api *s3.Client) (*s3.HeadObjectOutput, error) {
			return u.headObject(ctx, api, u.client.sse)
		})
	return err == nil && out.Metadata[markKey] == u.own.mark &&
		u.client.confirmKey(out.SSECustomerAlgorithm, out.SSECustomerKeyMD5, out.ResultMetadata) == nil
}

// endPublished releases the client if the object was published, also if only a later request shows that.
func (u *upload) endPublished(err error) error {
	if err != nil && u.client.heard.Load() && u.isPublished() { // a store that never answered is not asked
		err = nil
	}
	if err == nil {
		u.client.releaseClient()
	}
	return u.placeError("save", err)
}

// UndoPublish removes the published object; see source.Draft.
func (u *upload) UndoPublish(ctx context.Context) error {
	u.client.holdClient()
	defer u.client.releaseClient()
	_, err := callWithRetries(ctx, u.client, u.bucket, func(ctx context.Context, api *s3.Client) (struct{}, error) {
		return struct{}{}, u.removeOwn(ctx, api, u.client.sse)
	})
	return u.placeError("save", err)
}

// A request whose caller was cancelled may arrive, or be answered, within this time.
const lateParts = 2 * time.Second

// Abort removes the parts from the store. It has its own deadline, because the draft's context is often already
// cancelled.
func (u *upload) Abort() {
	defer u.client.releaseClient()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if u.begin != nil {
		select {
		case <-u.begin.done:
			if u.begin.err == nil {
				u.id = u.begin.out.UploadId
			}
		case <-time.After(lateParts):
		}
	}
	if !isNamed(u.id) {
		return
	}
	// A part in flight may arrive after an abort. Repeat the abort until the upload no longer exists.
	start := time.Now()
	for failures := 1; ; failures++ {
		_, _ = callWithRetries(ctx, u.client, u.bucket,
			func(ctx context.Context, api *s3.Client) (*s3.AbortMultipartUploadOutput, error) {
				return api.AbortMultipartUpload(ctx, &s3.AbortMultipartUploadInput{Bucket: &u.bucket, Key: &u.key,
					UploadId: u.id})
			})
		_, err := callWithRetries(ctx, u.client, u.bucket,
			func(ctx context.Context, api *s3.Client) (*s3.ListPartsOutput, error) {
				return api.ListParts(ctx, &s3.ListPartsInput{Bucket: &u.bucket, Key: &u.key, UploadId: u.id})
			})
		isGone := errors.Is(err, errs.ErrNotFound) && (!u.isCut || time.Since(start) > lateParts)
		if isGone || errors.Is(err, errs.ErrPermission) || retry.Pause(ctx, failures, 0) != nil {
			return
		}
	}
}

// Remove deletes an object. It succeeds if the object does not exist.
func Remove(ctx context.Context, uri string, opt source.Options) error {
	n, err := parseObject("save", uri)
	if err != nil {
		return err
	}
	c, err := acquireClient(ctx, opt)
	if err != nil {
		return n.placeError("save", err)
	}
	defer c.releaseClient()
	_, err = callWithRetries(ctx, c, n.bucket, func(ctx context.Context, api *s3.Client) (*s3.DeleteObjectOutput,
		error) {
		return api.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &n.bucket, Key: &n.key, VersionId: n.version})
	})
	if errors.Is(err, errs.ErrNotFound) {
		err = nil
	}
	return n.placeError("save", err)
}

// Walk returns the objects in a folder, sorted by name. With below it includes those in subfolders. An empty folder
// gives errs.ErrNotFound.
func Walk(ctx context.Context, uri string, opt source.Options, below bool) ([]source.Entry, error) {
	n, err := parseURI(uri)
	if err != nil {
		return nil, err
	}
	prefix := n.key
	if prefix != "" && !strings.HasSuffix(prefix, "/") {
		prefix += "/"
	}
	c, err := acquireClient(ctx, opt)
	if err != nil {
		return nil, n.placeError("open", err)
	}
	defer c.releaseClient()
	delimiter := aws.String("/")
	if below {
		delimiter = nil
	}
	var entries []source.Entry
	var next *string
	for page := 1; ; page++ {
		out, err := callWithRetries(ctx, c, n.bucket,
			func(ctx context.Context, api *s3.Client) (*s3.ListObjectsV2Output, error) {
				return api.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &n.bucket, Prefix: &prefix,
					Delimiter: delimiter, ContinuationToken: next})
			})
		if err != nil {
			return nil, n.placeError("open", err)
		}
		if out.Name == nil && out.KeyCount == nil && out.IsTruncated == nil && out.Contents == nil {
			return nil, n.placeError("open", errs.New(errs.ErrIO, "the store's response is not a listing"))
		}
		for _, o := range out.Contents {
			if o.Key != nil && strings.HasPrefix(*o.Key, prefix) && !strings.HasSuffix(*o.Key, "/") {
				e := source.Entry{Name: (*o.Key)[len(prefix):], Size: -1}
				if o.Size != nil {
					e.Size = *o.Size
				}
				entries = append(entries, e)
			}
		}
		if len(entries) > maxListed || page > maxPages {
			return nil, n.placeError("open", errs.New(errs.ErrNotSupported,
				"the folder has more than %d objects, or its listing more than %d pages", maxListed, maxPages))
		}
		next = out.NextContinuationToken
		if out.IsTruncated == nil || !*out.IsTruncated || next == nil {
			break
		}
	}
	if len(entries) == 0 {
		return nil, n.placeError("open", errs.New(errs.ErrNotFound, "the folder has no objects"))
	}
	slices.SortFunc(entries, func(a, b source.Entry) int { return strings.Compare(a.Name, b.Name) })
	return entries, nil
}

// A page of a listing has up to 1,000 objects and folders. Only objects count towards maxListed.
const maxListed, maxPages = 100_000, 10_000

// Presign returns a URL with which anyone can read the object until it expires (signature version 4, at most
// seven days). The URL is a secret.
func Presign(ctx context.Context, uri string, opt source.Options, expires time.Duration) (string, error) {
	n, err := parseObject("presign", uri)
	if err != nil {
		return "", err
	}
	if expires < time.Second || expires > 7*24*time.Hour {
		return "", n.placeError("presign", errs.New(errs.ErrArgument,
			"expected a lifetime of 1 second to 7 days for a presigned URL"))
	}
	c, err := acquireClient(ctx, opt)
	if err != nil {
		return "", n.placeError("presign", err)
	}
	defer c.releaseClient()
	if c.creds == nil {
		return "", n.placeError("presign", errs.New(errs.ErrArgument, "cannot sign a URL without credentials"))
	}
	if c.sse.key != nil {
		return "", n.placeError("presign", errs.New(errs.ErrNotSupported,
			"a presigned URL cannot contain the customer's key"))
	}
	out, err := s3.NewPresignClient(c.apiFor(n.bucket, true)).PresignGetObject(ctx,
		&s3.GetObjectInput{Bucket: &n.bucket, Key: &n.key, VersionId: n.version}, s3.WithPresignExpires(expires))
	if err != nil {
		return "", n.placeError("presign", classifyError(ctx, err))
	}
	return out.URL, nil
}

// callWithRetries is callOnce with retries and a watchdog, which aborts a request that sends no bytes and has
// no response within the timeout.
func callWithRetries[T any](ctx context.Context, c *client, bucket string,
	fn func(context.Context, *s3.Client) (T, error)) (out T, err error) {
	_, err = retry.Repeat(ctx, c.retry, c.judge, c.heard.Load, func() (err error) {
		ctx, stop := context.WithCancelCause(ctx)
		defer stop(nil)
		w := &watch{limit: c.retry.Timeout}
		w.timer = time.AfterFunc(w.limit, func() {
			stop(errs.New(errs.ErrTimeout, "the store accepted no bytes for %v", w.limit))
		})
		defer w.timer.Stop()
		ctx = context.WithValue(ctx, watch{}, w)
		out, err = callOnce(ctx, c, bucket, func(api *s3.Client) (T, error) { return fn(ctx, api) })
		err = classifyError(ctx, err)
		var r *refusal
		if err == nil || errors.As(err, &r) {
			c.heard.Store(true)
		}
		return err
	})
	return out, errs.FromOS(err)
}

// A watch is reset by every block of a body that the store accepts.
type watch struct {
	limit time.Duration
	timer *time.Timer
}
