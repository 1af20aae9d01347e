package s3

// This file adds checksums to uploads if a bucket requires them (Object Lock), and checks that the store uses
// the caller's key.

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"hash/crc32"

	awsmiddleware "github.com/aws/aws-sdk-go-v2/aws/middleware"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"github.com/aws/smithy-go/middleware"
	smithyhttp "github.com/aws/smithy-go/transport/http"

	"github.com/overwire/overwire/gosrc/errs"
)

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
