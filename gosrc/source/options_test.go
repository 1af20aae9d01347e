package source

import (
	"errors"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

// Errors about options name the option and never its value.
func TestOptions(t *testing.T) {
	const secret = "s3cr3t-value"
	o := Options{Storage: map[string]string{"token": secret, "header.X-Key": secret, "insecure": "true",
		"timeout": "2.5"}}
	if err := o.Check("http", "headers", "token", "insecure", "timeout"); err != nil {
		t.Error(err)
	}
	for _, known := range [][]string{{"token", "insecure", "timeout"}, {"headers", "insecure", "timeout"}} {
		err := o.Check("http", known...)
		if !errors.Is(err, errs.ErrArgument) || strings.Contains(err.Error(), secret) ||
			!strings.Contains(err.Error(), "insecure, timeout") {
			t.Errorf("%v", err)
		}
	}
	if on, err := o.Flag("insecure"); !on || err != nil {
		t.Error(on, err)
	}
	if n, err := o.Number("timeout", 30, 0.1, 100); n != 2.5 || err != nil {
		t.Error(n, err)
	}
	if n, err := o.Number("retries", 7, 0, 100); n != 7 || err != nil {
		t.Error(n, err)
	}
	for _, err := range []error{
		func() error { _, err := o.Flag("token"); return err }(),
		func() error { _, err := o.Number("token", 0, 0, 1); return err }(),
		func() error { _, err := o.Number("timeout", 0, 3, 9); return err }(),
	} {
		if !errors.Is(err, errs.ErrArgument) || strings.Contains(err.Error(), secret) {
			t.Errorf("%v", err)
		}
	}
	if again := o; o.Key() == (Options{}).Key() || again.Key() != o.Key() {
		t.Error("keys")
	}
	a, b := map[string]string{"a": "b", "c": "d"}, map[string]string{"a": "b\x00c", "d": ""}
	if (Options{Storage: a}).Key() == (Options{Storage: b}).Key() {
		t.Error("different options have the same key")
	}
}

// Options that select a store change the key of their own scheme only, and keys contain no secret.
func TestStore(t *testing.T) {
	set := func(in, name string) Options {
		values := map[string]string{name: "value"}
		if in == "env" {
			return Options{Env: values}
		}
		return Options{Storage: values}
	}
	for _, one := range []struct {
		scheme, in, name string
		counts           bool
	}{
		{"s3", "storage", "endpoint_url", true}, {"s3", "storage", "profile", true}, {"s3", "env", "AWS_ENDPOINT_URL", true},
		{"s3", "env", "AWS_ENDPOINT_URL_S3", true}, {"s3", "env", "AWS_DEFAULT_PROFILE", true},
		{"s3", "env", "AWS_CONFIG_FILE", true}, {"s3", "env", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", true},
		{"s3", "env", "HF_ENDPOINT", false}, {"s3", "env", "AWS_SESSION_TOKEN", false}, {"s3", "storage", "secret", false},
		{"hf", "env", "HF_ENDPOINT", true}, {"hf", "storage", "insecure", true}, {"hf", "storage", "token", false},
		{"https", "storage", "insecure", true}, {"https", "storage", "header.host", true},
		{"https", "storage", "header.Authorization", false}, {"http", "storage", "header.Host", true},
		{"http", "env", "HTTP_PROXY", false}, {"redis", "storage", "db", true}, {"rediss", "storage", "db", true},
		{"redis", "storage", "password", false}, {"redis", "env", "REDISCLI_AUTH", false},
	} {
		o := set(one.in, one.name)
		if got := o.StoreOf(one.scheme) != (Options{}).StoreOf(one.scheme); got != one.counts {
			t.Errorf("%+v: %v", one, got)
		}
		if one.counts && o.Key() == (Options{}).Key() {
			t.Errorf("%+v: the key is that of empty options", one)
		}
	}
}
