package source

// This file has the options of stores: what a caller passes as storage_options=.

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
)

// Options says how to reach a store. The zero value means the store's defaults and
// an empty environment. Values may be secrets: they never appear in messages, and
// errors name keys only.
type Options struct {
	// Storage is storage_options= of the caller, all values as text. Headers of
	// HTTP are entries "header.NAME".
	Storage map[string]string `json:"storage"`
	// Env holds the variables named by EnvNames, as Python's os.environ has them:
	// Go's own environment is that of the process's start.
	Env map[string]string `json:"env"`
	// Once makes an object that is written appear only where none is: see open.PutOnce.
	Once bool `json:"-"`
}

// HeaderPrefix begins the entries of Options.Storage that are HTTP headers.
const HeaderPrefix = "header."

// EnvNames are the variables that a store may need; a name that ends in * stands
// for all that begin so. Names of proxies are read in lower case too.
var EnvNames = []string{
	"AWS_*", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN",
	"HF_TOKEN_PATH",
	"HF_HUB_DISABLE_IMPLICIT_TOKEN", "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE",
	"HF_HUB_OFFLINE",
	"TRANSFORMERS_OFFLINE", "XDG_CACHE_HOME",
	"SSL_CERT_FILE", "SSL_CERT_DIR", "HOME", "USERPROFILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "REDISCLI_AUTH",
}

// Check refuses entries of Storage that the scheme does not know.
func (o Options) Check(scheme string, known ...string) error {
	for _, k := range slices.Sorted(maps.Keys(o.Storage)) {
		name := k
		if strings.HasPrefix(k, HeaderPrefix) {
			name = "headers"
		}
		if !slices.Contains(known, name) {
			return errs.New(errs.ErrArgument, "storage_options: %s:// has no option %q; it has %s", scheme, name,
				strings.Join(known, ", "))
		}
	}
	return nil
}

// Flag reads a switch of Storage, false if it is not given.
func (o Options) Flag(name string) (bool, error) {
	text, ok := o.Storage[name]
	if !ok {
		return false, nil
	}
	on, err := strconv.ParseBool(text)
	if err != nil {
		return false, errs.New(errs.ErrArgument, "storage_options: %s: expected true or false", name)
	}
	return on, nil
}

// Number reads a number of Storage from lo to hi, def if it is not given.
func (o Options) Number(name string, def, lo, hi float64) (float64, error) {
	text, ok := o.Storage[name]
	if !ok {
		return def, nil
	}
	n, err := strconv.ParseFloat(text, 64)
	if err != nil || !(n >= lo && n <= hi) {
		return 0, errs.New(errs.ErrArgument, "storage_options: %s: expected a number from %g to %g", name, lo, hi)
	}
	return n, nil
}

// Whole is Key with the environment: equal for options that mean the same.
func (o Options) Whole() string { return o.Key() + "\x00" + quotePairs(o.Env) }

// Key is equal for equal Storage and equal stores: what was reached with one set of credentials must
// not be given to a caller with another. It contains the values.
func (o Options) Key() string {
	if len(o.Storage) == 0 && len(o.Env) == 0 { // local files
		return ""
	}
	key := quotePairs(o.Storage)
	for _, scheme := range slices.Sorted(maps.Keys(choices)) {
		key += "\x00" + o.StoreOf(scheme)
	}
	return key
}

func quotePairs(values map[string]string) string {
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(values)) {
		b.WriteString("\x00" + strconv.Quote(k) + strconv.Quote(values[k]))
	}
	return b.String()
}

// choices are, by scheme, the options and variables that say where the objects of a URI are, or
// whether it is certain who sends them. None is a secret.
var choices = map[string]struct{ storage, env []string }{
	"s3": {[]string{"endpoint_url", "aws_endpoint_url", "endpoint", "profile", "profile_name", "region", "region_name",
		"aws_region"}, []string{"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL",
		"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_CONFIG_FILE",
		"AWS_SHARED_CREDENTIALS_FILE", "AWS_REGION", "AWS_DEFAULT_REGION"}},
	"hf":     {[]string{"insecure"}, []string{"HF_ENDPOINT"}},
	"https":  {[]string{"insecure"}, nil},
	"redis":  {[]string{"db"}, nil},
	"rediss": {[]string{"db"}, nil},
}

// StoreOf is what chooses the store that a URI of a scheme names, beside the URI: what one store has
// or said is not another's, whatever ETag it gives. It contains no secret.
func (o Options) StoreOf(scheme string) string {
	values := map[string]string{}
	for _, name := range choices[scheme].storage {
		if value := o.Storage[name]; value != "" {
			values[name] = value
		}
	}
	for _, name := range choices[scheme].env {
		if value := o.Env[name]; value != "" {
			values["$"+name] = value
		}
	}
	for name, value := range o.Storage {
		if strings.EqualFold(name, HeaderPrefix+"Host") {
			values["Host"] = value
		}
	}
	return quotePairs(values)
}
