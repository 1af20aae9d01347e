//go:build !nostores

package open

// This file lists the schemes that support writing. The build tag nostores excludes them from builds that do
// not test them, because their libraries take long to compile.

import (
	"context"

	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/redis"
	"github.com/overwire/overwire/gosrc/source/s3"
)

// stores are the schemes that support writing.
var stores = map[string]store{
	"s3": {
		func(ctx context.Context, uri string, opt source.Options) (source.Source, error) {
			return wrapSource(s3.Open(ctx, uri, opt))
		},
		s3.Create, s3.Remove, s3.Walk, s3.Presign,
	},
	"redis":  {inRedis, redis.Create, redis.Remove, nil, nil},
	"rediss": {inRedis, redis.Create, redis.Remove, nil, nil},
}

func inRedis(ctx context.Context, uri string, opt source.Options) (source.Source, error) {
	return wrapSource(redis.Open(ctx, uri, opt))
}
