package s3

// This file sends the bodies of uploads, adds checksums if a bucket requires them (Object Lock), and decides which
// responses confirm that the store has the bytes, encrypted with the caller's key. The status is not enough: some
// stores, and proxies in front of them, respond with 200 and an empty body or an error.

import (
	"bytes"
	"context"
	"crypto/md5"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net/http"
	"sort"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	awsmiddleware "github.com/aws/aws-sdk-go-v2/aws/middleware"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"github.com/aws/smithy-go"
	"github.com/aws/smithy-go/middleware"
	smithyhttp "github.com/aws/smithy-go/transport/http"
	"github.com/overwire/overwire/gosrc/errs"
)

// isNamed reports whether a field of a response, such as an ETag or an id, is not empty.
func isNamed(s *string) bool { return s != nil && *s != "" }

// isUnclear reports whether an upload may be complete although the response to its completion does not say so. Either
// the response had no result or could not be parsed, or the response to an earlier, successful attempt was lost.
func isUnclear(err error, tries int) bool {
	var resp *awshttp.ResponseError
	var api smithy.APIError
	switch {
	case err == nil:
		return true
	case errors.As(err, &api):
		return tries > 1 && api.ErrorCode() == "NoSuchUpload"
	}
	return errors.As(err, &resp) && resp.HTTPStatusCode()/100 == 2
}

// confirmUpload requests the object of a complete upload. The object must have the right size and the ETag that
// results from its parts. If the store's ETags are not MD5s, the object must be at least as new as the upload,
// by the store's clock.
func (u *upload) confirmUpload(ctx context.Context, api *s3.Client) error {
	out, err := u.headObject(ctx, api, u.client.sse)
	if err != nil {
		return u.absentError(ctx, err)
	}
	sum := combinedETag(u.done)
	switch {
	case out.ContentLength == nil || *out.ContentLength != u.size:
	case sum != "" && out.ETag != nil && strings.Trim(*out.ETag, `"`) == sum:
		return nil
	case sum == "" && out.LastModified != nil && !u.begun.IsZero() && !out.LastModified.Before(u.begun):
		return nil
	}
	return errs.New(errs.ErrIO, "the store's response does not confirm that the upload is complete, and the object "+
		"with this name is a different one")
}

// refusedOnce reports whether a write with If-None-Match was refused because the object exists.
func (u *upload) refusedOnce(err error) bool {
	var resp *awshttp.ResponseError
	if u.once == nil || !errors.As(err, &resp) {
		return false
	}
	switch resp.HTTPStatusCode() {
	case http.StatusPreconditionFailed, http.StatusConflict, http.StatusNotImplemented:
		return true
	}
	return false
}

// notOnce handles a write for which refusedOnce returned true. ours returns nil if the existing object is this
// one: an earlier attempt succeeded and its response was lost. If the store does not support If-None-Match, the
// next attempt is an unconditional write.
func (u *upload) notOnce(err error, tries int, ours func() error) error {
	var resp *awshttp.ResponseError
	_ = errors.As(err, &resp)
	switch resp.HTTPStatusCode() {
	case http.StatusConflict:
		return errs.New(errs.ErrIO, "another writer is completing this object")
	case http.StatusNotImplemented:
		u.once = nil
		return errs.New(errs.ErrIO, "the store does not support If-None-Match")
	}
	if tries > 1 && ours() == nil {
		return nil
	}
	return errs.New(errs.ErrArgument, "the object already exists, and this write must not replace it")
}

// compareObject reads a small object back if the response to its upload had no ETag.
func (u *upload) compareObject(ctx context.Context, api *s3.Client, whole []byte) error {
	out, err := api.GetObject(ctx, &s3.GetObjectInput{Bucket: &u.bucket, Key: &u.key,
		SSECustomerAlgorithm: u.client.sse.algorithm, SSECustomerKey: u.client.sse.key,
		SSECustomerKeyMD5: u.client.sse.sum})
	if err != nil {
		return u.absentError(ctx, err)
	}
	defer out.Body.Close()
	back, err := io.ReadAll(io.LimitReader(out.Body, int64(len(whole))+1))
	if err != nil {
		return err
	}
	if !bytes.Equal(back, whole) {
		return errs.New(errs.ErrIO, "the store's response has no ETag, and the stored object has different content")
	}
	return nil
}

// absentError returns the error of a request for an object that should exist.
func (u *upload) absentError(ctx context.Context, err error) error {
	if errors.Is(classifyError(ctx, err), errs.ErrNotFound) {
		return errs.New(errs.ErrIO,
			"the store's response does not confirm that the object is stored, and the object does not exist")
	}
	return err
}

// beginAnew aborts the upload with this id after the store refused a part without a checksum. The next part then begins
// an upload with checksums. beginAnew reports whether to send the refused part again. It returns true without aborting
// anything if the upload was already replaced because of another part.
func (u *upload) beginAnew(ctx context.Context, id *string, err error) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case u.id != id:
		return true
	case u.isSummed || len(u.done) > 0 || !mayWantSum(ctx, err):
		return false
	}
	_, _ = callWithRetries(ctx, u.client, u.bucket,
		func(ctx context.Context, api *s3.Client) (*s3.AbortMultipartUploadOutput, error) {
			in := &s3.AbortMultipartUploadInput{Bucket: &u.bucket, Key: &u.key, UploadId: id}
			return api.AbortMultipartUpload(ctx, in)
		})
	u.id, u.isSummed = nil, true
	return ctx.Err() == nil
}

// publishWithKey writes a small object as a multipart upload of one part. The response to the part shows
// whether the store uses the customer's key; if not, an existing object is preserved. For a store without
// multipart uploads, it returns 0 parts.
func (u *upload) publishWithKey(ctx context.Context, whole []byte) (parts int, err error) {
	if u.client.sse.key == nil || len(whole) == 0 {
		return 0, nil
	}
	err = u.Part(ctx, 0, [][]byte{whole})
	if err == nil {
		return 1, nil
	}
	if errs.RuleOf(err) != ruleNoKey && errors.Is(err, errs.ErrNotSupported) {
		return 0, nil
	}
	return 0, err
}

// removeUnencrypted removes an object that the store has not encrypted with the customer's key. It returns why
// if that succeeds.
func (u *upload) removeUnencrypted(ctx context.Context, api *s3.Client, why error) error {
	if err := u.removeOwn(ctx, api, sse{}); err != nil {
		return errs.New(errs.ErrNotSupported, "the store does not confirm that it encrypts with "+
			"sse_customer_key, and the unencrypted object could not be removed: %v", classifyError(ctx, err))
	}
	return why
}

// headObject asks for the metadata of the object with the upload's name, which may be another one.
func (u *upload) headObject(ctx context.Context, api *s3.Client, key sse) (*s3.HeadObjectOutput, error) {
	return api.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &u.bucket, Key: &u.key,
		SSECustomerAlgorithm: key.algorithm, SSECustomerKey: key.key, SSECustomerKeyMD5: key.sum})
}

// removeOwn removes the object if it has the mark of this upload. The deletion has the condition that the ETag is still
// the same. A store that ignores this condition removes an object that replaced this one between the two requests.
func (u *upload) removeOwn(ctx context.Context, api *s3.Client, key sse) error {
	out, err := u.headObject(ctx, api, key)
	if errors.Is(classifyError(ctx, err), errs.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	switch mark, ok := out.Metadata[markKey]; {
	case !ok && (u.own.etag == "" || aws.ToString(out.ETag) == u.own.etag):
		return errs.New(errs.ErrNotSupported, "it was not removed, because it could be another program's object: the "+
			"store does not return the metadata with which it was written")
	case mark != u.own.mark:
		return nil
	}
	in := &s3.DeleteObjectInput{Bucket: &u.bucket, Key: &u.key, IfMatch: out.ETag}
	_, err = api.DeleteObject(ctx, in)
	if errors.Is(classifyError(ctx, err), errs.ErrNotSupported) {
		in.IfMatch = nil
		_, err = api.DeleteObject(ctx, in)
	}
	r, isRefusal := errors.AsType[*refusal](classifyError(ctx, err))
	switch {
	case isRefusal && r.class == errs.ErrNotFound:
		return nil
	case isRefusal && r.status == http.StatusPreconditionFailed:
		// Another program has replaced the object, or the store compares other ETags than it sends, such as weak ones.
		out, err = u.headObject(ctx, api, key)
		if errors.Is(classifyError(ctx, err), errs.ErrNotFound) || err == nil && out.Metadata[markKey] != u.own.mark {
			return nil
		}
		if err == nil {
			err = errs.New(errs.ErrNotSupported, "it was not removed: the store refuses the ETag that it sends")
		}
	}
	return err
}

// combinedETag returns the ETag of an object that consists of these sorted parts, or "" if the parts' ETags are
// not MD5s.
func combinedETag(done []types.CompletedPart) string {
	sums := md5.New()
	for _, p := range done {
		sum, err := hex.DecodeString(strings.Trim(*p.ETag, `"`))
		if err != nil || len(sum) != md5.Size {
			return ""
		}
		_, _ = sums.Write(sum)
	}
	return fmt.Sprintf("%x-%d", sums.Sum(nil), len(done))
}

// A wary client treats a deletion as failed if the response is 200 with an error. The SDK does the same for the
// completion of an upload.
type wary struct{ s3.HTTPClient }

func (w wary) Do(r *http.Request) (*http.Response, error) {
	resp, err := w.HTTPClient.Do(r)
	if err != nil || r.Method != http.MethodDelete || resp.StatusCode != http.StatusOK {
		return resp, err
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	_ = resp.Body.Close()
	if err != nil {
		return nil, err
	}
	if resp.Body = io.NopCloser(bytes.NewReader(text)); bytes.Contains(text, []byte("<Error")) {
		resp.StatusCode = http.StatusInternalServerError
	}
	return resp, nil
}

// A body reads several byte slices in order, and resets the watchdog of its request.
type body struct {
	all  [][]byte
	ends []int64 // end offset of each slice
	at   int64
	w    *watch
}

func bodyOf(ctx context.Context, all [][]byte) io.ReadSeeker {
	b := &body{all: all, w: ctx.Value(watch{}).(*watch)}
	end := int64(0)
	for _, one := range all {
		end += int64(len(one))
		b.ends = append(b.ends, end)
	}
	return b
}

func sizeOf(all [][]byte) (n int64) {
	for _, one := range all {
		n += int64(len(one))
	}
	return n
}

// restHere returns at most n of the remaining bytes in the current slice, or nil at the end of the body.
func (b *body) restHere(n int) []byte {
	k := sort.Search(len(b.ends), func(k int) bool { return b.ends[k] > b.at })
	if k == len(b.ends) {
		return nil
	}
	one := b.all[k]
	one = one[int64(len(one))-(b.ends[k]-b.at):]
	return one[:min(n, len(one))]
}

func (b *body) Read(p []byte) (n int, err error) {
	b.w.timer.Reset(b.w.limit)
	for n < len(p) {
		one := b.restHere(len(p) - n)
		if one == nil {
			break
		}
		n += copy(p[n:], one)
		b.at += int64(len(one))
	}
	if n == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	return n, nil
}

// WriteTo writes in blocks and resets the watchdog for each.
func (b *body) WriteTo(w io.Writer) (n int64, err error) {
	for one := b.restHere(block); one != nil && err == nil; one = b.restHere(block) {
		b.w.timer.Reset(b.w.limit)
		var k int
		k, err = w.Write(one)
		b.at += int64(k)
		n += int64(k)
	}
	return n, err
}

const block = 256 << 10

func (b *body) Seek(off int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		off += b.at
	case io.SeekEnd:
		off += sizeOf(b.all)
	}
	if off < 0 {
		return 0, errors.New("seek to before the start of the body")
	}
	b.at = off
	return off, nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// checksumOf returns the CRC32C of a body in the format of S3's header, or nil for uploads without a checksum.
// Stores other than AWS refuse unknown checksums, so checksums are only sent to buckets that require them.
func checksumOf(p [][]byte, isWanted bool) *string {
	if !isWanted {
		return nil
	}
	sum := uint32(0)
	for _, one := range p {
		sum = crc32.Update(sum, castagnoli, one)
	}
	text := base64.StdEncoding.EncodeToString(binary.BigEndian.AppendUint32(nil, sum))
	return &text
}

// algorithmOf names the checksum of a request, or for CreateMultipartUpload the checksum of the parts.
func algorithmOf(isSummed bool) types.ChecksumAlgorithm {
	if isSummed {
		return types.ChecksumAlgorithmCrc32c
	}
	return ""
}

// mayWantSum reports whether a store may have refused an upload because it has no checksum. Buckets with a
// default retention (Object Lock) do so, with various codes such as InvalidRequest and MissingContentMD5.
func mayWantSum(ctx context.Context, err error) bool {
	r, ok := errors.AsType[*refusal](classifyError(ctx, err))
	return ok && r.class == errs.ErrArgument
}

func (c *client) sendsSums(bucket string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.summed[bucket]
}

// noteSums records for later uploads that a bucket requires checksums.
func (c *client) noteSums(bucket string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.summed[bucket] = true
}

// ruleNoKey is the rule of the error of confirmKey.
const ruleNoKey = "CustomerKeyNotUsed"

// confirmKey checks that the store has encrypted with the customer's key, according to its response to an upload. A
// store that does not support such keys stores the bytes without encryption. Its response then does not mention the
// key, or it repeats the request's headers including the key, which a supporting store never does.
func (c *client) confirmKey(algorithm, sum *string, answer middleware.Metadata) error {
	raw, ok := awsmiddleware.GetRawResponse(answer).(*smithyhttp.Response)
	isEcho := ok && raw.Header.Get("X-Amz-Server-Side-Encryption-Customer-Key") != ""
	if c.sse.key == nil || !isEcho && algorithm != nil && *algorithm == *c.sse.algorithm &&
		(sum == nil || *sum == *c.sse.sum) {
		return nil
	}
	return errs.WithRule(ruleNoKey, errs.New(errs.ErrNotSupported, "the store does not confirm that it encrypts with "+
		"sse_customer_key, so anyone who can read the bucket could read the object: nothing was saved"))
}

// explainKey adds to the error of a refused read that a customer's key may be missing or wrong.
func (c *client) explainKey(err error) error {
	if r, ok := errors.AsType[*refusal](err); ok && r.class == errs.ErrArgument && says[r.code] == "" {
		r.message = "if the object was saved with a customer's key, set sse_customer_key in storage_options"
		if c.sse.key != nil {
			r.message = "the object may have been saved with a different sse_customer_key, or without one"
		}
	}
	return err
}
