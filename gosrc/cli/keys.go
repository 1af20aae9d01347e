package cli

// This file reads keys and passwords of encrypted .tensors files.

import (
	"errors"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/tensorizer"
)

// Options say where a key or password is, and never contain the secret itself, because
// other users of the machine can read command lines.
var (
	decryptOptions = []option{
		{name: "decrypt-key", value: "FROM",
			doc: "key of encrypted .tensors files (32 bytes or 64 hex digits): file:PATH or env:NAME"},
		{name: "decrypt-password", value: "FROM", doc: "password of encrypted .tensors files: file:PATH or env:NAME"},
	}
	encryptOptions = []option{
		{name: "encrypt-key", value: "FROM", doc: "key to encrypt the .tensors file with: file:PATH or env:NAME"},
		{name: "encrypt-password", value: "FROM", doc: "password to encrypt it with: file:PATH or env:NAME"},
	}
)

// keys reads the key or password that the options with this prefix name, and returns it as engine settings.
func (c *call) keys(prefix string) (map[string]string, error) {
	name, wrong, read := prefix+"-key", "must contain 32 bytes or 64 hex digits", tensorizer.KeySettings
	from, isGiven := c.opts[name]
	if password, also := c.opts[prefix+"-password"]; also {
		if isGiven {
			return nil, usage("--%s-key and --%s-password cannot be combined", prefix, prefix)
		}
		name, wrong, read = prefix+"-password", "is empty", tensorizer.PasswordSettings
		from, isGiven = password, true
	}
	if !isGiven {
		return nil, nil
	}
	b, err := c.secret(name, from)
	if err != nil {
		return nil, err
	}
	settings, ok := read(b)
	if !ok {
		return nil, usage("--%s: %s %s", name, from, wrong)
	}
	return settings, nil
}

// secret reads the content of file:PATH or env:NAME.
func (c *call) secret(name, from string) ([]byte, error) {
	const most = 64 << 10
	kind, rest, _ := strings.Cut(from, ":")
	switch {
	case kind == "file" && rest != "":
		b, err := regular.Read(rest, most)
		if errors.Is(err, errs.ErrFormat) {
			return nil, usage("--%s: %s has more than %d bytes", name, rest, most)
		}
		if err != nil {
			return nil, errs.In("read", rest, err)
		}
		return b, nil
	case kind == "env" && rest != "":
		text, ok := c.env.Secrets[rest]
		if !ok {
			return nil, usage("--%s: the variable %s is not set", name, rest)
		}
		return []byte(text), nil
	}
	return nil, usage("--%s: write file:PATH or env:NAME; a secret on the command line would show in the list of "+
		"processes", name)
}
