package s3

import (
	"net/http"
	"testing"

	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/smithy-go"
	smithyhttp "github.com/aws/smithy-go/transport/http"
)

// A refusal shows status, code and request id. If the response has no body, it shows the meaning of the status.
func TestRefusal(t *testing.T) {
	answer := func(status int, code string) error {
		resp := &smithyhttp.Response{Response: &http.Response{StatusCode: status, Header: http.Header{}}}
		return &awshttp.ResponseError{RequestID: "R1", ResponseError: &smithyhttp.ResponseError{Response: resp,
			Err: &smithy.GenericAPIError{Code: code, Message: "the key AKIA"}}}
	}
	for _, c := range []struct {
		status     int
		code, want string
	}{
		{403, "", "permission denied: Forbidden (status 403, request R1)"},
		{403, "AccessDenied", "permission denied: AccessDenied: access denied (status 403, request R1)"},
		{400, "Odd", "bad argument: Odd (status 400, request R1)"},
	} {
		if got := classifyError(t.Context(), answer(c.status, c.code)).Error(); got != c.want {
			t.Errorf("%d %q: %q", c.status, c.code, got)
		}
	}
}
