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
		t.Error("two options with one key")
	}
}
