package source

// This file defines the options of stores, which callers pass as storage_options=, and what a reader expects of an
// object that it opens.

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
)

// Options describes how to reach a store. The zero value means the store's defaults and an empty environment. Values
// may be secrets, so messages never contain them; errors name only keys.
type Options struct {
	// Storage is the caller's storage_options=, with all values as text. HTTP headers have keys of the form
	// "header.NAME".
	Storage map[string]string `json:"storage"`
	// Env holds the current values in Python's os.environ of the variables in EnvNames. Go's own environment
	// only has the values from the start of the process.
	Env map[string]string `json:"env"`
	// Fed means that pieces of objects may come from the process's supplier; see package fed.
	Fed bool `json:"fed"`
	// Once makes a write fail if the object exists already: see open.PutOnce.
	Once bool `json:"-"`
	// Outline is what the reader expects of the object that is opened.
	Outline Outline `json:"-"`
}

// HeaderPrefix is the prefix of the keys in Options.Storage that set HTTP headers.
const HeaderPrefix = "header."

// EnvNames are the variables that a store may need. A name that ends in * stands for all names with that
// prefix. Proxy variables are also read in lower case.
var EnvNames = []string{
	"AWS_*", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN",
	"HF_TOKEN_PATH", "HF_HUB_DISABLE_IMPLICIT_TOKEN", "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE",
	"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "XDG_CACHE_HOME",
	"SSL_CERT_FILE", "SSL_CERT_DIR", "HOME", "USERPROFILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "REDISCLI_AUTH",
}

// Check refuses keys of Storage that the scheme does not support.
func (o Options) Check(scheme string, known ...string) error {
	for _, k := range slices.Sorted(maps.Keys(o.Storage)) {
		name := k
		if strings.HasPrefix(k, HeaderPrefix) {
			name = "headers"
		}
		if !slices.Contains(known, name) {
			return errs.New(errs.ErrArgument, "storage_options: %s:// has no option %q: expected %s", scheme, name,
				strings.Join(known, ", "))
		}
	}
	return nil
}

// Flag reads a boolean from Storage. It returns false if the key is missing.
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

// Number reads a number between lo and hi from Storage. It returns def if the key is missing.
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

// Whole is Key plus the environment. Options with equal results have the same effect.
func (o Options) Whole() string { return o.Key() + "\x00" + quotePairs(o.Env) }

// Key returns equal keys for options with equal Storage that reach the same stores. Data read with one set of
// credentials must not be returned to a caller with different ones. A key contains the secret values.
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

// choices are the options and variables of each scheme that determine where a URI's objects are or which
// credentials are used. None of them is secret.
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

// StoreOf returns the settings that, together with a URI of this scheme, determine which store it refers to. Data
// from one store is never used for another, even if the ETags are equal. The result contains no secrets.
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

// An Outline is what a reader expects of an object. Some stores do not report sizes, so their objects are read
// from the beginning. With an outline, such a source stops when the object cannot be the expected one. The zero
// value expects nothing.
type Outline struct {
	// Most is the largest size that the object may have, in bytes; 0 means any size.
	Most int64
	// Size derives the object's size from its first bytes. It returns -1 if they do not state it. If need exceeds
	// len(head), Size must be called again with that many bytes. A nil Size means that the size is unknown.
	Size func(uri string, head []byte) (size, need int64, err error)
	// Longer means that the object may have more bytes than Size reports; those are not needed.
	Longer bool
}
