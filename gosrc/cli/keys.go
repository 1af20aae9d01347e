package cli

import (
	"errors"
	"strings"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/tensorizer"
)

// Keys and passwords of .tensors files are named, never written out: other users
// of the machine see command lines.
var (
	decryptOptions = []option{
		{name: "decrypt-key", value: "FROM", doc: "of encrypted .tensors files: file:PATH or env:NAME with 32 bytes or 64 hex digits"},
		{name: "decrypt-password", value: "FROM", doc: "likewise, with a password"},
	}
	encryptOptions = []option{
		{name: "encrypt-key", value: "FROM", doc: "of the .tensors file that is written"},
		{name: "encrypt-password", value: "FROM", doc: "likewise"},
	}
)

// keys are the options that begin with a prefix, as the engine has them.
func (c *call) keys(prefix string) (map[string]string, error) {
	key, isKey := c.opts[prefix+"-key"]
	password, isPassword := c.opts[prefix+"-password"]
	switch {
	case isKey && isPassword:
		return nil, usage("--%s-key and --%s-password exclude each other", prefix, prefix)
	case isKey:
		b, err := c.secret(prefix+"-key", key)
		if err != nil {
			return nil, err
		}
		settings, ok := tensorizer.KeySettings(b)
		if !ok {
			return nil, usage("--%s-key: expected 32 bytes or 64 hex digits there", prefix)
		}
		return settings, nil
	case isPassword:
		b, err := c.secret(prefix+"-password", password)
		if err != nil {
			return nil, err
		}
		settings, ok := tensorizer.PasswordSettings(b)
		if !ok {
			return nil, usage("--%s-password: it is empty there", prefix)
		}
		return settings, nil
	}
	return nil, nil
}

// secret reads what file:PATH or env:NAME has.
func (c *call) secret(name, from string) ([]byte, error) {
	const most = 64 << 10
	kind, rest, _ := strings.Cut(from, ":")
	switch {
	case kind == "file" && rest != "":
		b, err := regular.Read(rest, most)
		if errors.Is(err, fault.ErrFormat) {
			return nil, usage("--%s: %s has more than %d bytes", name, rest, most)
		}
		if err != nil {
			return nil, &fault.At{Verb: "read", Source: rest, Chunk: -1, Offset: -1, Err: err}
		}
		return b, nil
	case kind == "env" && rest != "":
		text, ok := c.env.Secrets[rest]
		if !ok {
			return nil, usage("--%s: the variable %s is not set", name, rest)
		}
		return []byte(text), nil
	}
	return nil, usage("--%s: expected file:PATH or env:NAME; a secret itself would show in the list of processes", name)
}
