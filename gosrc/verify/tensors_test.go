package verify

import (
	"bytes"
	"encoding/hex"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/overwire/overwire/gosrc/convert"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/tensorizer"
)

var sealedBy = format.Access{Decrypt: map[string]string{tensorizer.OptionKey: strings.Repeat("17", 32)}}

// packedTensors returns a small .tensors file without padding, of at least the given version. It has flat and nested
// names and every kind of record.
func packedTensors(t *testing.T, sealed bool, version uint32) []byte {
	t.Helper()
	key, _ := hex.DecodeString(strings.Repeat("17", 32))
	texts := []string{"<f4", "|V1\x00torch.float8_e4m3fn", "<i2", "<f4"}
	items := make([]tensorizer.Item, len(texts))
	data := make([][]byte, len(texts))
	for i, name := range []string{"a", "\x1e[\"m\",0,\"w\"]", "\x1e[\"m\",1]", "empty"} {
		items[i] = tensorizer.Item{Module: uint16(i), Type: tensorizer.StateDict, Name: name, Text: texts[i],
			Dims: []int64{6}, Sealed: sealed}
	}
	data[0], data[1], data[2] = make([]byte, 24), make([]byte, 6), make([]byte, 12)
	if items[3].Dims = []int64{0, 3}; version == 4 || version == 5 {
		items[3].Dims = []int64{2, 3} // without data
	}
	if version == 5 {
		items[3].Dims, items[3].Text = []int64{1<<32 + 1, 0}, "|u1"
	}
	if version < 2 {
		items[1].Text, items[1].Dims = "|u1", []int64{2, 3}
	}
	for i := range items {
		for k := range data[i] {
			data[i][k] = byte(7*k + i)
		}
		if items[i].Bytes = int64(len(data[i])); sealed && data[i] != nil {
			dst := bytes.Clone(data[i]) // one box
			items[i].Crypt = tensorizer.NewCrypt(items[i].Bytes, nil)
			items[i].Crypt.Seal(dst, 0, (*[32]byte)(key))
			s := items[i].Summer()
			s.Write(data[i])
			data[i] = append(items[i].Finish(s), dst...)
			continue
		}
		s := items[i].Summer()
		s.Write(data[i])
		data[i] = append(items[i].Finish(s), data[i]...)
	}
	length := tensorizer.IndexBytes(items)
	at := tensorizer.Start(length)
	for i := range items {
		items[i].Record = at
		at += int64(len(data[i]))
	}
	b, err := tensorizer.Front(items, version, length)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range data {
		b = append(b, d...)
	}
	return append(b, make([]byte, tensorizer.Tail)...)
}

// Verify detects any single flipped bit in a plain and in an encrypted .tensors file, and names the file. In files of
// other versions, and in one that save writes, the test flips a sample of bits.
func TestTensorsFlips(t *testing.T) {
	files := map[string][]byte{}
	for _, version := range []uint32{1, 2, 4, 5} {
		files[string(rune('0'+version))+" plain"] = packedTensors(t, false, version)
		files[string(rune('0'+version))+" sealed"] = packedTensors(t, true, version)
	}
	written := filepath.Join(t.TempDir(), "x.tensors")
	in := []save.Input{{Name: "a", DType: tensor.F32, Shape: []int64{5}, Data: make([]byte, 20)}}
	if _, err := save.Write(t.Context(), nil, save.Spec{Path: written,
		Storage: format.Access{Encrypt: maps.Clone(sealedBy.Decrypt)}}, in); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(written)
	if err != nil {
		t.Fatal(err)
	}
	files["written sealed"] = b[:]
	var wg sync.WaitGroup
	flips := 0
	for name, whole := range files {
		opt := format.Access{}
		if strings.Contains(name, "sealed") {
			opt = sealedBy
		}
		path := filepath.Join(t.TempDir(), "file.tensors")
		if err := os.WriteFile(path, whole, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Verify(t.Context(), nil, []string{path}, opt, false); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		step := 5
		switch {
		case name == "1 plain" || name == "4 sealed":
			step = 1
		case testing.Short() || strings.HasPrefix(name, "written"):
			step = 17 // bits; the file is mostly padding
		}
		flips += 8 * len(whole) / step
		wg.Add(1)
		go func() {
			defer wg.Done()
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				t.Error(err)
				return
			}
			defer f.Close()
			for bit := 0; bit < 8*len(whole); bit += step {
				at, was := int64(bit/8), whole[bit/8]
				_, _ = f.WriteAt([]byte{was ^ 1<<(bit%8)}, at)
				_, err := Verify(t.Context(), nil, []string{path}, opt, false)
				if err == nil || !strings.Contains(err.Error(), "file.tensors") ||
					!anyOf(err, errs.ErrCorrupt, errs.ErrFormat, errs.ErrCrypto, errs.ErrNotSupported) {
					t.Errorf("%s of %d bytes: bit %d of byte %d: %v", name, len(whole), bit%8, at, err)
				}
				_, _ = f.WriteAt([]byte{was}, at)
			}
		}()
	}
	wg.Wait()
	t.Logf("%d flips of %d files", flips, len(files))
}

func anyOf(err error, classes ...error) bool {
	for _, c := range classes {
		if errors.Is(err, c) {
			return true
		}
	}
	return false
}

// Converting, encrypting or decrypting a .tensors file preserves types, modules, dtypes that other formats lack, and
// tensors without data.
func TestTensorsRekeyed(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	if err := os.WriteFile(at("a.tensors"), packedTensors(t, false, 4), 0o600); err != nil {
		t.Fatal(err)
	}
	rewrite := func(from, to string, opt format.Access) {
		t.Helper()
		if _, err := convert.Convert(t.Context(), nil, []string{at(from)}, at(to),
			save.Spec{Compress: true, Storage: opt}); err != nil {
			t.Fatal(err)
		}
	}
	rewrite("a.tensors", "b.tensors", format.Access{})
	rewrite("b.tensors", "sealed.tensors", format.Access{Encrypt: sealedBy.Decrypt})
	rewrite("sealed.tensors", "c.tensors", sealedBy)
	b, _ := os.ReadFile(at("b.tensors"))
	if c, _ := os.ReadFile(at("c.tensors")); string(b) != string(c) || len(b) == 0 {
		t.Errorf("%d bytes became %d", len(b), len(c))
	}
	if s, _ := os.ReadFile(at("sealed.tensors")); s[5] != 4 || s[9] != 1 {
		t.Error("the encrypted file is not encrypted")
	}
	for _, c := range []struct {
		to    string
		class error
	}{{"x.safetensors", errs.ErrArgument}, {"folder/", errs.ErrArgument}} {
		_, err := convert.Convert(t.Context(), nil, []string{at("a.tensors")}, at("")+"/"+c.to,
			save.Spec{Storage: format.Access{Encrypt: sealedBy.Decrypt}})
		if !errors.Is(err, c.class) {
			t.Errorf("encrypted %s: %v", c.to, err)
		}
	}
}
