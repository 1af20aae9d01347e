package fetch

import (
	"bytes"
	"context"
	"testing"

	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

// Fetched objects follow the common redirect policy.
func TestRoutes(t *testing.T) {
	sourcetest.Routes(t, func(uri string, opt source.Options) ([]byte, error) {
		var b bytes.Buffer
		_, err := Fetch(context.Background(), nil, Spec{URIs: []string{uri}, Storage: opt, Own: true}, &b)
		return b.Bytes(), err
	})
}
