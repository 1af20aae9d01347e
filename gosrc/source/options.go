package source

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/overwire/overwire/gosrc/fault"
)

// Options is what a caller says about reaching a store. The zero value is the
// store's own defaults and an empty environment. Values may be secrets: they
// stay out of every text that people see, and errors name keys only.
type Options struct {
	// Storage is storage_options= of the caller, all values as text. Headers of
	// HTTP are entries "header.NAME".
	Storage map[string]string `json:"storage"`
	// Env is the process's environment as Python sees it, the names of EnvNames
	// only. Go's own view of it is that of the process's start.
	Env map[string]string `json:"env"`
}

// HeaderPrefix begins the entries of Options.Storage that are HTTP headers.
const HeaderPrefix = "header."

// EnvNames are the variables that a store may need; a name that ends in * is
// the beginning of one. Names of proxies are read in lower case too.
var EnvNames = []string{
	"AWS_*", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "HF_TOKEN", "HF_ENDPOINT", "HF_HOME",
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
			return fault.New(fault.ErrArgument, "storage_options: %s:// has no option %q; it has %s", scheme, name, strings.Join(known, ", "))
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
		return false, fault.New(fault.ErrArgument, "storage_options: %s: expected true or false", name)
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
		return 0, fault.New(fault.ErrArgument, "storage_options: %s: expected a number from %g to %g", name, lo, hi)
	}
	return n, nil
}

// Key is the same text for the same Storage: what was reached with one may not be
// given to a caller with another. It has the values in it.
func (o Options) Key() string {
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(o.Storage)) {
		b.WriteString("\x00" + strconv.Quote(k) + strconv.Quote(o.Storage[k]))
	}
	return b.String()
}
