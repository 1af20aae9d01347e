package s3

// This file classifies S3 errors and writes their texts without secrets.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source/retry"
	"github.com/overwire/overwire/gosrc/source/route"
)

// maxText is how many bytes of a store's text an error shows.
const maxText = 128

// A refusal is an error response of a store. Its text contains what the store's support needs: status, code and
// request id.
type refusal struct {
	class   error
	status  int
	code    string
	message string
	request string
	after   time.Duration // how long the store asked to wait
}

func (r *refusal) Error() string {
	var b strings.Builder
	b.WriteString(r.class.Error())
	for _, part := range []string{r.code, r.message} {
		if part != "" {
			b.WriteString(": " + part)
		}
	}
	if r.after >= time.Second {
		fmt.Fprintf(&b, ": the store asked to wait %.0f s", r.after.Seconds())
	}
	fmt.Fprintf(&b, " (status %d", r.status)
	if r.request != "" {
		b.WriteString(", request " + r.request)
	}
	b.WriteString(")")
	return b.String()
}

func (r *refusal) Unwrap() error { return r.class }

// says explains error codes.
var says = map[string]string{
	"InvalidAccessKeyId":    "the store does not know this access key",
	"SignatureDoesNotMatch": "the secret key does not match the access key, or the request was changed in transit",
	"ExpiredToken":          "the session token has expired",
	"TokenRefreshRequired":  "the session token has expired",
	"InvalidToken":          "the session token is not valid",
	"NoSuchBucket":          "the bucket does not exist",
	"NoSuchKey":             "the object does not exist",
	"NotFound":              "the object does not exist",
	"AccessDenied":          "access denied",
	"Forbidden":             "access denied",
	"RequestTimeTooSkewed":  "this machine's clock is wrong",
	"PreconditionFailed":    "the object was changed while it was read",
	"InvalidObjectState":    "the object is archived and must be restored first",
}

// classifyError returns an error of the SDK with a class and a text without secrets. The SDK's texts contain URLs. A
// store's messages may contain the access key, the signed string or the token, so only the texts of says are used.
func classifyError(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return errs.FromOS(context.Cause(ctx))
	}
	if errs.Classed(err) {
		return classOf(err)
	}
	if id := innermostService(err); id != "" && id != s3.ServiceID {
		return lackCredentials("%s; %s refused the request%s", noCredentials, id, statusOf(err))
	}
	var api smithy.APIError
	if resp, ok := errors.AsType[*awshttp.ResponseError](err); ok && resp.HTTPStatusCode() > 0 {
		r := &refusal{status: resp.HTTPStatusCode(), request: route.PrintableText(resp.ServiceRequestID(), maxText)}
		if errors.As(err, &api) {
			r.code = route.PrintableText(api.ErrorCode(), maxText)
		}
		if r.message = says[r.code]; r.code == "" { // a response without a body has no code
			r.message = http.StatusText(r.status)
		}
		r.after = route.WaitAsked(resp.Response.Header)
		r.class = statusClass(r.status, r.code)
		if route.Redirect(r.status) {
			r.message = "a redirect" + leadsTo(resp.Response.Header.Get("Location")) +
				" is refused, because the request is signed for this host: " +
				"set region or endpoint_url to those of the bucket"
		}
		if r.message == "" && r.status < 300 {
			r.message = "the response could not be parsed"
		}
		return r
	}
	if errors.As(err, &api) { // 200 with an error in its body: CompleteMultipartUpload
		return &refusal{class: statusClass(0, api.ErrorCode()), status: http.StatusOK,
			code: route.PrintableText(api.ErrorCode(), maxText), message: says[api.ErrorCode()]}
	}
	return transportError(err)
}

// classOf returns one of our own errors with its class, rule and innermost text, without what the SDK wrapped
// around it.
func classOf(err error) error {
	if at, ok := errors.AsType[*errs.At](err); ok {
		return at
	}
	for {
		inner := errors.Unwrap(err)
		if inner == nil || !errs.Classed(inner) || errors.Unwrap(inner) == nil ||
			errs.RuleOf(inner) != errs.RuleOf(err) {
			return err
		}
		err = inner
	}
}

// leadsTo returns the host of a Location, the only part of it that is not secret.
func leadsTo(location string) string {
	u, err := url.Parse(location)
	if err != nil || u.Hostname() == "" {
		return ""
	}
	return " to " + strconv.Quote(route.PrintableText(u.Hostname(), maxText))
}

func statusClass(status int, code string) error {
	switch {
	case route.Redirect(status):
		return errs.ErrPermission
	case code == "PreconditionFailed" || status == http.StatusPreconditionFailed:
		return errs.ErrCorrupt
	case code == "RequestTimeout" || status == http.StatusRequestTimeout:
		return errs.ErrTimeout
	case code == "ExpiredToken", code == "InvalidToken", code == "TokenRefreshRequired", code == "InvalidAccessKeyId",
		code == "SignatureDoesNotMatch", code == "AuthorizationHeaderMalformed", code == "RequestTimeTooSkewed",
		status == http.StatusUnauthorized, status == http.StatusForbidden:
		return errs.ErrPermission
	case status == http.StatusNotFound, code == "NoSuchKey", code == "NoSuchBucket":
		return errs.ErrNotFound
	case status == http.StatusRequestedRangeNotSatisfiable:
		return errs.ErrCorrupt
	case status == http.StatusNotImplemented, status == http.StatusMethodNotAllowed:
		return errs.ErrNotSupported
	case status == http.StatusBadRequest:
		return errs.ErrArgument
	}
	return errs.ErrIO
}

// innermostService returns the innermost service that returned an error, because a request may fetch credentials first.
func innermostService(err error) (id string) {
	for {
		var op *smithy.OperationError
		if !errors.As(err, &op) {
			return id
		}
		id, err = op.Service(), op.Unwrap()
	}
}

func statusOf(err error) string {
	var api smithy.APIError
	var resp *awshttp.ResponseError
	switch {
	case errors.As(err, &api) && errors.As(err, &resp):
		return fmt.Sprintf(": %s (status %d, request %s)", route.PrintableText(api.ErrorCode(), maxText),
			resp.HTTPStatusCode(), route.PrintableText(resp.ServiceRequestID(), maxText))
	case errors.As(err, &resp):
		return fmt.Sprintf(": status %d", resp.HTTPStatusCode())
	}
	return ""
}

const noCredentials = "no credentials: storage_options has no key and secret or profile, AWS_ACCESS_KEY_ID is " +
	"not set, and no profile, container or instance has any; anon=True reads public objects unsigned"

// lackCredentials returns the error for missing credentials. Callers recognise it by the rule NoCredentials, and can
// retry without credentials, because the object may be public.
func lackCredentials(format string, args ...any) error {
	return errs.WithRule("NoCredentials", errs.New(errs.ErrPermission, format, args...))
}

// transportError returns the system's error text without URLs.
func transportError(err error) error {
	if s := err.Error(); strings.Contains(s, "get identity") || strings.Contains(s, "get credentials") ||
		strings.Contains(s, "refresh cached credentials") {
		return lackCredentials("%s", noCredentials)
	}
	var ne net.Error
	var op *net.OpError
	var dns *net.DNSError
	switch {
	case errors.As(err, &ne) && ne.Timeout():
		return errs.New(errs.ErrTimeout, "the store did not respond in time")
	case errors.As(err, &dns):
		return errs.New(errs.ErrIO, "the store's name %q cannot be resolved", dns.Name)
	case errors.As(err, &op):
		return errs.New(errs.ErrIO, "%s: %v", op.Op, op.Err)
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return errs.New(errs.ErrIO, "the connection was closed in the middle of a response")
	}
	for inner := err; inner != nil; inner = errors.Unwrap(err) {
		err = inner
	}
	return errs.New(errs.ErrIO, "%v", err)
}

func judgeError(err error) (retry.Verdict, time.Duration) {
	var r *refusal
	if !errors.As(err, &r) {
		if errors.Is(err, errs.ErrIO) || errors.Is(err, errs.ErrTimeout) {
			return retry.Again, 0
		}
		return retry.Never, 0
	}
	switch {
	case r.code == "SlowDown", strings.HasPrefix(r.code, "Throttling"), r.status == http.StatusServiceUnavailable,
		r.status == http.StatusTooManyRequests:
		return retry.Busy, max(r.after, 200*time.Millisecond)
	case r.code == "RequestTimeout", r.code == "InternalError", r.status == http.StatusRequestTimeout,
		r.status >= 500 && r.status != http.StatusNotImplemented:
		return retry.Busy, r.after
	case r.status/100 == 2: // the response could not be parsed
		return retry.Again, 0
	}
	return retry.Never, 0
}
