// Package tensorizer reads and writes the .tensors files of CoreWeave's tensorizer. All integers are little-endian,
// and nothing is aligned:
//
//	"|TZR|" | u32 version | 32 bytes of flags | u64 data bytes | 8 zero bytes | u64 tensors | u64 L
//	      | L bytes of index | records | 8 zero bytes
//
//	index entry: [u32 entry version, 1 or 5, in files of version 5] u16 n, name | u8 type | u8 n,
//	             dtype | u8 rank | dims, u32 or u64 each |
//	             u64 offset of the record | u64 offset of the data | u64 bytes of the data
//	record:      u64 bytes up to the data | u16 module | u8 type | u16 n, name | u8 n, dtype | u8 rank | dims |
//	             u16 n, hashes: u8 count, each u8 kind, u8 n, sum | [u64 n, encryption] | [padding]
//	             | i64 bytes of the data | the data
//	encryption:  u16 count, each: u64 n, u16 kind, body
//
// Version 1 is the first. Version 2 adds torch's own dtypes, version 3 encryption, version 4 flags and tensors
// without data ("meta"), which read as zeros. Version 5 adds dims of 2^32 and more, in entries of version 5. Flag 1
// means encrypted, flag 2 that index entries have versions. Hashes cover the record up to its data, with zeros for
// the hashes and without the encryption, and then the data before encryption.
//
// The specification is the code of tensorizer 2.11 and 2.12. Tests compare this package with it in both directions.
// The unreleased layout of 3.0-dev is refused; its files also have version 5, but not flag 2.
//
// A file becomes a tensor.Index like a file of any other format. Encrypted data and tensors without data cannot be
// read directly: SourceOf returns a Source that decrypts them.
package tensorizer

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	// Format is the name of the format in an index; see tensor.Source.
	Format = "tensors"
	// Extension is the file name extension of .tensors files.
	Extension = ".tensors"
	// Magic is the start of every file.
	Magic = "|TZR|"
	// PathMark is the first byte of names that are paths, which are JSON lists of strings and numbers.
	PathMark = "\x1e"

	headSize = 73

	// The bits of a file's flags; see the package comment.
	encrypted = 1
	tagged    = 2 // index entries begin with their version; always set in version 5

	maxVersion = 5
	maxMeta    = 16 << 30 // maximum total size of tensors without data
)

// The type of an entry says which part of a module the tensor is.
const (
	Parameter = iota
	Buffer
	StateDict
)

var le = binary.LittleEndian

// Is reports whether a file that starts with head is a .tensors file.
func Is(head []byte) bool { return len(head) >= len(Magic) && string(head[:len(Magic)]) == Magic }

// numpy maps numpy's dtype names, and torch maps the names of dtypes that numpy does not have. tensorizer writes the
// latter as a numpy type of the same size, NUL, and torch's name.
var (
	numpy = map[string]tensor.DType{
		"|b1": tensor.Bool, "|u1": tensor.U8, "|i1": tensor.I8, "<i2": tensor.I16, "<u2": tensor.U16, "<f2": tensor.F16,
		"<i4": tensor.I32, "<u4": tensor.U32, "<f4": tensor.F32,
		"<i8": tensor.I64, "<u8": tensor.U64, "<f8": tensor.F64, "<c8": tensor.C64,
	}
	torch = map[string]tensor.DType{
		"torch.bfloat16": tensor.BF16, "torch.float8_e4m3fn": tensor.F8E4M3, "torch.float8_e5m2": tensor.F8E5M2,
		"torch.float8_e4m3fnuz": tensor.F8E4M3FNUZ, "torch.float8_e5m2fnuz": tensor.F8E5M2FNUZ,
		"torch.float8_e8m0fnu": tensor.F8E8M0, "torch.float4_e2m1fn_x2": tensor.F4,
	}
)

// dtypeOf returns a dtype and the shape in elements. torch counts F4 in pairs, so that shape differs from dims.
func dtypeOf(text string, dims []int64) (tensor.DType, []int64, error) {
	if d, ok := numpy[text]; ok {
		return d, dims, nil
	}
	form, name, opaque := strings.Cut(text, "\x00")
	if opaque {
		if strings.Contains(name, "\x00") {
			return 0, nil, errs.New(errs.ErrFormat, "invalid dtype %q", text)
		}
		if d, ok := torch[name]; ok {
			if want := opaqueForm(d); form != want {
				return 0, nil, errs.New(errs.ErrFormat, "invalid dtype %q: %s must be stored as %s, not as "+
					"%s", text, name,
					want, form)
			}
			if d == tensor.F4 {
				if len(dims) == 0 {
					return 0, nil, errs.New(errs.ErrNotSupported, "invalid shape: F4 needs at least one dimension")
				}
				dims = append([]int64(nil), dims...)
				if dims[len(dims)-1] > 1<<62 {
					return 0, nil, errs.New(errs.ErrFormat, "the last dimension is too large: shape %v", dims)
				}
				dims[len(dims)-1] *= 2
			}
			return d, dims, nil
		}
	}
	return 0, nil, errs.New(errs.ErrNotSupported, "safetensors does not have the dtype %q", text)
}

// itemSize returns the element size in bytes of a dtype that safetensors does not have.
func itemSize(text string) (int64, bool) {
	form, _, _ := strings.Cut(text, "\x00")
	if len(form) < 3 || form[0] != '<' && form[0] != '|' || !strings.Contains("Vc", form[1:2]) {
		return 0, false
	}
	n, err := strconv.ParseUint(form[2:], 10, 8)
	return int64(n), err == nil && n > 0
}

func opaqueForm(d tensor.DType) string {
	if d.Bits() == 16 {
		return "<V2"
	}
	return "|V1"
}

// dtypeText is the inverse of dtypeOf.
func dtypeText(d tensor.DType, shape []int64) (text string, dims []int64, err error) {
	for text, dtype := range numpy {
		if d == dtype {
			return text, shape, nil
		}
	}
	for name, dtype := range torch {
		if d != dtype {
			continue
		}
		if d == tensor.F4 {
			if len(shape) == 0 || shape[len(shape)-1]%2 != 0 {
				return "", nil, errs.New(errs.ErrNotSupported, "F4 of shape %v cannot be stored: .tensors files "+
					"hold pairs, so the last dimension must be even", shape)
			}
			shape = append([]int64(nil), shape...)
			shape[len(shape)-1] /= 2
		}
		return opaqueForm(d) + "\x00" + name, shape, nil
	}
	return "", nil, errs.New(errs.ErrNotSupported, ".tensors files do not support %v", d)
}

// checkName checks that a name is UTF-8, and that only an entry of a state dict has a path.
func checkName(name string, kind uint8) error {
	if !utf8.ValidString(name) {
		return errs.New(errs.ErrFormat, "the name is not valid UTF-8")
	}
	path, is := strings.CutPrefix(name, PathMark)
	if !is {
		return nil
	}
	if kind != StateDict {
		return errs.New(errs.ErrFormat, "the name is a path, but the tensor is not from a state dict")
	}
	bad := errs.New(errs.ErrFormat, "the path is not a list of strings and numbers")
	if !strings.HasPrefix(path, "[") || !strings.HasSuffix(path, "]") || strings.ContainsAny(path, "\r\n") {
		return bad
	}
	var parts []json.RawMessage
	if json.Unmarshal([]byte(path), &parts) != nil || len(parts) == 0 {
		return bad
	}
	for _, p := range parts {
		var text string
		var number uint64
		if p[0] == '"' && json.Unmarshal(p, &text) == nil {
			continue
		}
		if p[0] < '0' || p[0] > '9' || json.Unmarshal(p, &number) != nil {
			return bad
		}
	}
	return nil
}

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
