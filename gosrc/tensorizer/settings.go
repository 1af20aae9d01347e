package tensorizer

// This file lists the settings for reading and writing .tensors files.

import (
	"bytes"
	"encoding/hex"
)

// These are the settings for reading and writing .tensors files.
const (
	OptionKey      = "key"      // 64 hex digits
	OptionPassword = "password" // hex digits of the password's bytes
	OptionBytes    = "bytes"    // read unknown dtypes as bytes; see IndexOf
	OptionCRC32    = "crc32"    // compare the CRC32 of plain tensors when they are read
)

// KeySettings returns the settings for the key in a key file, which contains its bytes, or their hex digits with
// optional whitespace around them. ok is false for anything else.
func KeySettings(b []byte) (settings map[string]string, ok bool) {
	if len(b) != keyBytes {
		raw, err := hex.DecodeString(string(bytes.TrimSpace(b)))
		if err != nil || len(raw) != keyBytes {
			return nil, false
		}
		b = raw
	}
	return map[string]string{OptionKey: hex.EncodeToString(b)}, true
}

// PasswordSettings returns the settings for the password in a password file. It ignores a final line break. ok is
// false for an empty password.
func PasswordSettings(b []byte) (settings map[string]string, ok bool) {
	b = bytes.TrimSuffix(bytes.TrimSuffix(b, []byte("\n")), []byte("\r"))
	return map[string]string{OptionPassword: hex.EncodeToString(b)}, len(b) > 0
}
