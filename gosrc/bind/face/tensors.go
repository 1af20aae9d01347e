package face

import (
	"context"
	"encoding/hex"
	"unsafe"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/format/tensors"
	"github.com/overwire/overwire/gosrc/load"
)

// TensorsRecords tells of the one .tensors file of the JSON of a load.Spec,
// whose field "records" asks for the records too: the JSON of load.TensorsFile.
func TensorsRecords(spec string) (string, error) {
	s, err := parse[load.Spec]("spec", spec)
	if err != nil {
		return "", err
	}
	more, err := parse[struct {
		Records bool `json:"records"`
	}]("spec", spec)
	if err != nil {
		return "", err
	}
	if len(s.URIs) != 1 {
		return "", fault.New(fault.ErrArgument, "%d files", len(s.URIs))
	}
	f, err := load.Records(context.Background(), s.URIs[0], s.Storage, more.Records)
	if err != nil {
		return "", err
	}
	return encode(f)
}

// A record is a tensor of a .tensors file that is being written.
type record struct {
	Module uint16              `json:"module"`
	Type   uint8               `json:"type"`
	Name   string              `json:"name"`
	DType  string              `json:"dtype"`
	Dims   []int64             `json:"dims"`
	Bytes  int64               `json:"bytes"`
	Record int64               `json:"record"`
	Data   int64               `json:"data"`
	Sealed bool                `json:"sealed"` // the file is encrypted
	Key    string              `json:"key"`    // hex digits
	Derive *tensors.Derivation `json:"derive"`
}

func (r *record) item() (tensors.Item, error) {
	it := tensors.Item{Module: r.Module, Type: r.Type, Name: r.Name, Text: r.DType, Dims: r.Dims, Bytes: r.Bytes, Record: r.Record, Sealed: r.Sealed}
	return it, it.Check()
}

// memory is the caller's, of n bytes from an address.
func memory(addr uint64, n int64) []byte {
	p := uintptr(addr)
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&p))), n)
}

// TensorsRecord gives, in hex digits, the record that stands before the data of
// the tensor that the JSON describes, its sums made of the data at an address.
// If the JSON has a key, sealed is memory of the same size, which gets the data
// encrypted.
func TensorsRecord(spec string, data, sealed uint64) (string, error) {
	r, err := parse[record]("spec", spec)
	if err != nil {
		return "", err
	}
	it, err := r.item()
	if err != nil {
		return "", err
	}
	if it.Bytes > 0 && (data == 0 || r.Key != "" && sealed == 0) {
		return "", fault.New(fault.ErrArgument, "%d bytes at 0", it.Bytes)
	}
	plain := memory(data, it.Bytes)
	if r.Key != "" && it.Bytes > 0 {
		key, err := hex.DecodeString(r.Key)
		if err != nil || len(key) != 32 {
			return "", fault.New(fault.ErrArgument, "a key has 32 bytes")
		}
		it.Crypt = tensors.Seal(memory(sealed, it.Bytes), plain, (*[32]byte)(key))
		it.Crypt.Derive = r.Derive
	}
	s := it.Summer()
	s.Write(plain)
	return hex.EncodeToString(it.Finish(s)), nil
}

// TensorsFront gives, in hex digits, the head and the index of a .tensors file:
// JSON with its "items" as they were written, with the "length" of the index.
func TensorsFront(spec string) (string, error) {
	f, err := parse[struct {
		Items   []record `json:"items"`
		Length  int64    `json:"length"`
		Version uint32   `json:"version"`
	}]("spec", spec)
	if err != nil {
		return "", err
	}
	items := make([]tensors.Item, len(f.Items))
	for i := range f.Items {
		if items[i], err = f.Items[i].item(); err != nil {
			return "", err
		}
		items[i].Pad = f.Items[i].Data - items[i].Data()
	}
	if f.Length < 0 || f.Length > 1<<30 {
		return "", fault.New(fault.ErrArgument, "an index of %d bytes", f.Length)
	}
	b, err := tensors.Front(items, f.Version, f.Length)
	if err != nil {
		return "", err
	}
	return hex.EncodeToString(b), nil
}

// TensorsSums gives CRC32 and SHA-256 of a prefix and n bytes at an address, in
// hex digits, as they are written: "crc32 sha256".
func TensorsSums(prefix string, data uint64, n int64) (string, error) {
	p, err := hex.DecodeString(prefix)
	if err != nil || n < 0 || n > 0 && data == 0 {
		return "", fault.New(fault.ErrArgument, "%d bytes at %d", n, data)
	}
	s := tensors.NewSummer(p)
	s.Write(memory(data, n))
	crc, sha := s.Sums()
	return hex.EncodeToString(crc) + " " + hex.EncodeToString(sha), nil
}

// TensorsKey derives a key from the "password" (hex digits) of the JSON and its
// tensors.Derivation.
func TensorsKey(spec string) (string, error) {
	d, err := parse[tensors.Derivation]("spec", spec)
	if err != nil {
		return "", err
	}
	p, err := parse[struct {
		Password string `json:"password"`
	}]("spec", spec)
	if err != nil {
		return "", err
	}
	password, err := hex.DecodeString(p.Password)
	if err != nil || len(password) == 0 {
		return "", fault.New(fault.ErrArgument, "the password is empty")
	}
	key, err := d.Key(password)
	if err != nil {
		return "", err
	}
	return hex.EncodeToString(key), nil
}
