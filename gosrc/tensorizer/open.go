package tensorizer

// This file opens .tensors files to load, verify or describe them, and lists their settings.

import (
	"bytes"
	"context"
	"encoding/hex"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// ruleKind is the rule of the error for a file that is not a .tensors file or is too short for one.
const ruleKind = "NotTensors"

// Open reads the head and the index of a file. It also reads the records if requested or if the file is encrypted.
// The error is errs.ErrFormat for other formats, otherwise the error of Read.
func Open(ctx context.Context, src source.Source, records bool) (*File, error) {
	head, err := source.Head(ctx, src)
	if err != nil {
		return nil, errs.In("index", src.URI(), err)
	}
	if !Is(head) {
		return nil, errs.Place("index", src.URI(), "", 0, errs.WithRule(ruleKind, errs.New(errs.ErrFormat,
			"this is not a .tensors file")))
	}
	f, err := Read(ctx, src, head)
	if err == nil && records {
		err = f.ReadRecords(ctx, src)
	}
	return f, err
}

// An Opened is a source with its head, index and records, which have been read. ReadIndex does not read them again.
type Opened struct {
	source.Source
	File *File
}

// ReadIndex is Index for the opened file, with the names in the file.
func (o *Opened) ReadIndex(ctx context.Context, settings map[string]string, known tensor.Known) (*tensor.Index,
	source.Source, error) {
	return indexOn(ctx, o.File, o.Source, settings, known)
}

// Index reads the file that starts with head. It returns the validated index and the source of the tensors (see
// SourceOf), according to the settings. The index has the tensors' names in state_dict(). Index compares it with the
// records (see compareRecords). known reports which codecs can be decoded.
func Index(ctx context.Context, src source.Source, head []byte, settings map[string]string,
	known tensor.Known) (*tensor.Index, source.Source, error) {
	f, err := Read(ctx, src, head)
	if err == nil {
		err = f.compareRecords(ctx, src)
	}
	if err != nil {
		return nil, src, err
	}
	ix, plain, err := indexOn(ctx, f, src, settings, known)
	if err == nil {
		names := f.stateNames()
		for i := range ix.Tensors {
			ix.Tensors[i].Name = names[ix.Tensors[i].Name]
		}
	}
	return ix, plain, err
}

func indexOn(ctx context.Context, f *File, src source.Source, settings map[string]string, known tensor.Known) (
	*tensor.Index, source.Source, error) {
	ix, err := IndexOf(f, settings)
	if err != nil {
		return nil, src, err
	}
	if err := ix.Validate(known); err != nil {
		return nil, src, err
	}
	if _, ok := settings[OptionCRC32]; ok && f.Records == nil {
		if err := f.ReadRecords(ctx, src); err != nil {
			return nil, src, err
		}
	}
	plain, err := SourceOf(ctx, f, src, settings)
	if err != nil {
		return nil, src, err
	}
	return ix, plain, nil
}

// RefuseSettings checks the settings for a file in a different format. A key gives a NotEncryptedError. A request to
// compare CRC32 gives errs.ErrArgument if the file has no checksums (sums is false).
func RefuseSettings(uri string, settings map[string]string, sums bool) error {
	at := func(class error, format string, args ...any) error {
		return errs.In("index", uri, errs.New(class, format, args...))
	}
	for _, secret := range []string{OptionKey, OptionPassword} {
		if _, isGiven := settings[secret]; isGiven {
			return &NotEncryptedError{at(errs.ErrCrypto,
				"a %s was given, but the file is not encrypted: it is not a .tensors file", secret)}
		}
	}
	if _, isAsked := settings[OptionCRC32]; isAsked && !sums {
		return at(errs.ErrArgument, "verify_crc32 was requested, but a plain safetensors file has no checksums to "+
			"compare")
	}
	return nil
}

// A Description describes a file's head, index and records.
type Description struct {
	URI       string             `json:"uri"`
	Version   uint32             `json:"version"`
	Encrypted bool               `json:"encrypted"`
	Total     int64              `json:"total"` // bytes of data
	Size      int64              `json:"size"`
	Entries   []EntryDescription `json:"entries"`
}

// An EntryDescription describes one tensor of a file. Fields from the record are only set if the records were read.
type EntryDescription struct {
	Entry
	Module uint16      `json:"module"`
	Prefix []byte      `json:"prefix,omitempty"`
	CRC32  string      `json:"crc32,omitempty"`
	SHA256 string      `json:"sha256,omitempty"`
	Sealed bool        `json:"sealed"`
	Derive *Derivation `json:"derive,omitempty"`
}

// The names of the settings; their values are text.
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
