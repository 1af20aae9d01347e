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
	"encoding/binary"
	"encoding/json"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/overwire/overwire/gosrc/errs"
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
		"|b1": tensor.Bool, "|u1": tensor.U8, "|i1": tensor.I8,
		"<i2": tensor.I16, "<u2": tensor.U16, "<f2": tensor.F16,
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
