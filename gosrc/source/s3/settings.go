package s3

// This file reads S3 settings from options, environment and profiles.

import (
	"cmp"
	"context"
	"crypto/md5"
	"encoding/base64"
	"errors"
	"maps"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"strings"

	"github.com/aws/aws-sdk-go-v2/config"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/retry"
	"github.com/overwire/overwire/gosrc/source/route"
)

// names are the storage options of s3://.
var names = append([]string{"key", "secret", "token", "profile", "region", "endpoint_url", "anon", "sse_customer_key",
	"path_style", "cacert"}, retry.Names...)

// aliases maps names of options in other libraries to ours.
var aliases = map[string]string{
	"aws_access_key_id": "key", "aws_secret_access_key": "secret", "aws_session_token": "token",
	"access_key_id": "key", "secret_access_key": "secret", "session_token": "token",
	"aws_endpoint_url": "endpoint_url", "endpoint": "endpoint_url",
	"region_name": "region", "aws_region": "region", "profile_name": "profile",
}

// withOwnNames replaces aliases by our names. It refuses different values for the same option.
func withOwnNames(opt source.Options) (source.Options, error) {
	own := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(opt.Storage)) {
		to := cmp.Or(aliases[name], name)
		if had, isTwice := own[to]; isTwice && had != opt.Storage[name] {
			return opt, errs.New(errs.ErrArgument,
				"storage_options: %s and %s are the same option, but have different values", to, name)
		}
		own[to] = opt.Storage[name]
	}
	opt.Storage = own
	return opt, nil
}

// settings combine the values of the caller, the environment and the profile, in this order of precedence.
type settings struct {
	opt      source.Options
	profile  config.SharedConfig
	profiled bool // the caller or the environment named the profile

	region    string
	endpoint  string // "" means AWS's own endpoint
	pathStyle bool
	anon      bool
	fips      bool
	dual      bool
	trust     route.Trust
	retry     retry.Options
	sse       sse
}

// sse is the customer's key with which the store encrypts (SSE-C).
type sse struct{ algorithm, key, sum *string }

func (s *settings) env(name string) string { return s.opt.Env[name] }

func resolveSettings(ctx context.Context, opt source.Options) (*settings, error) {
	if err := opt.Check("s3", names...); err != nil {
		return nil, err
	}
	s := &settings{opt: opt}
	var err error
	if s.retry, err = retry.Parse(opt); err != nil {
		return nil, err
	}
	if s.anon, err = opt.Flag("anon"); err != nil {
		return nil, err
	}
	if err := s.loadProfile(ctx); err != nil {
		return nil, err
	}
	s.region = cmp.Or(opt.Storage["region"], s.env("AWS_REGION"), s.env("AWS_DEFAULT_REGION"), s.profile.Region,
		"us-east-1")
	if !validRegion(s.region) {
		return nil, errs.New(errs.ErrArgument, "region: %q is not a valid region name", s.region)
	}
	s.fips = strings.EqualFold(s.env("AWS_USE_FIPS_ENDPOINT"), "true")
	s.dual = strings.EqualFold(s.env("AWS_USE_DUALSTACK_ENDPOINT"), "true")
	s.trust = route.Named(cmp.Or(opt.Storage["cacert"], s.profile.CustomCABundle), "", opt.Env)
	if s.endpoint, err = s.endpointFor(ctx, "S3", opt.Storage["endpoint_url"]); err != nil {
		return nil, err
	}
	s.pathStyle = s.endpoint != "" && !virtualOnly(s.endpoint)
	if _, ok := opt.Storage["path_style"]; ok {
		if s.pathStyle, err = opt.Flag("path_style"); err != nil {
			return nil, err
		}
	}
	return s, s.customerKey()
}

// loadProfile reads the configuration files of the AWS tools. A profile that was not named explicitly need not exist.
func (s *settings) loadProfile(ctx context.Context) error {
	name := cmp.Or(s.opt.Storage["profile"], s.env("AWS_PROFILE"), s.env("AWS_DEFAULT_PROFILE"))
	s.profiled = name != ""
	file := func(variable, usual string) []string {
		path := s.env(variable)
		switch {
		case path == "" && s.homeFolder() == "":
			return []string{}
		case path == "":
			path = filepath.Join(s.homeFolder(), ".aws", usual)
		case strings.HasPrefix(path, "~/"):
			path = filepath.Join(s.homeFolder(), path[2:])
		}
		return []string{path}
	}
	p, err := config.LoadSharedConfigProfile(ctx, cmp.Or(name, "default"), func(o *config.LoadSharedConfigOptions) {
		o.ConfigFiles = file("AWS_CONFIG_FILE", "config")
		o.CredentialsFiles = file("AWS_SHARED_CREDENTIALS_FILE", "credentials")
	})
	var none config.SharedConfigProfileNotExistError
	switch {
	case errors.As(err, &none) && !s.profiled:
		return nil
	case errors.As(err, &none):
		return errs.New(errs.ErrArgument, "profile %q is not in AWS's configuration files", name)
	case err != nil:
		// The library's text may quote lines of the file, which may be secret.
		return errs.New(errs.ErrArgument, "profile %q cannot be read from AWS's configuration files",
			cmp.Or(name, "default"))
	}
	s.profile = p
	return nil
}

func (s *settings) homeFolder() string { return cmp.Or(s.env("HOME"), s.env("USERPROFILE")) }

// endpointFor returns a service's endpoint: the first of the caller's endpoint, AWS_ENDPOINT_URL_<ID>,
// AWS_ENDPOINT_URL, the profile's services section, and the profile's endpoint. "" means AWS.
func (s *settings) endpointFor(ctx context.Context, id, word string) (string, error) {
	at := word
	ignore := strings.EqualFold(s.env("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"), "true")
	if p := s.profile.IgnoreConfiguredEndpoints; p != nil && *p {
		ignore = true
	}
	if at == "" && !ignore {
		at = cmp.Or(s.env("AWS_ENDPOINT_URL_"+id), s.env("AWS_ENDPOINT_URL"))
		if at == "" {
			at, _, _ = s.profile.GetServiceBaseEndpoint(ctx, id)
		}
		at = cmp.Or(at, s.profile.BaseEndpoint)
	}
	if at == "" {
		return "", nil
	}
	if !strings.Contains(at, "://") {
		at = "https://" + at
	}
	u, err := url.Parse(at)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.User != nil || u.RawQuery != "" ||
		u.Fragment != "" {
		return "", errs.New(errs.ErrArgument,
			"the endpoint of %s must be http(s)://host[:port][/path], without user or query", id)
	}
	return at, nil
}

// virtualOnly reports whether a store requires the bucket in the host name. All other endpoints accept it in the path.
func virtualOnly(endpoint string) bool {
	u, err := url.Parse(endpoint)
	if err != nil || net.ParseIP(u.Hostname()) != nil {
		return false
	}
	host := "." + strings.ToLower(u.Hostname())
	domains := []string{".amazonaws.com", ".amazonaws.com.cn", ".cwobject.com", ".cwlota.com", ".aliyuncs.com",
		".myqcloud.com"}
	return slices.ContainsFunc(domains, func(domain string) bool { return strings.HasSuffix(host, domain) })
}

// customerKey sets an SSE-C key: 32 bytes, raw or in base64.
func (s *settings) customerKey() error {
	word, ok := s.opt.Storage["sse_customer_key"]
	if !ok {
		return nil
	}
	key := []byte(word)
	if len(key) != 32 {
		b, err := base64.StdEncoding.DecodeString(word)
		if err != nil || len(b) != 32 {
			return errs.New(errs.ErrArgument, "sse_customer_key: expected 32 bytes, or their base64")
		}
		key = b
	}
	algorithm, text := "AES256", base64.StdEncoding.EncodeToString(key)
	if u, err := url.Parse(s.endpoint); err == nil && u.Scheme == "http" {
		return errs.New(errs.ErrArgument, "sse_customer_key: the key would be sent unencrypted, because endpoint_url "+
			"is http://%s: use an https:// endpoint", u.Host)
	}
	sum := md5.Sum(key) // the protocol requires the MD5 of the key
	check := base64.StdEncoding.EncodeToString(sum[:])
	s.sse = sse{&algorithm, &text, &check}
	return nil
}

// validRegion accepts only a single label, because the region becomes part of a host name.
func validRegion(name string) bool {
	return name != "" && len(name) <= 63 && strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-") == ""
}
