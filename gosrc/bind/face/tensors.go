package face

import (
	"context"
	"encoding/hex"
	"unsafe"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/tensorizer"
)

// tensorsRecords tells of the one .tensors file of the JSON of a load.Spec,
// whose field "records" asks for the records too: the JSON of tensorizer.Description.
func tensorsRecords(ctx context.Context, spec string) (string, error) {
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
	src, err := open.With(s.Storage.Options)(ctx, s.URIs[0])
	if err != nil {
		return "", err
	}
	defer src.Close()
	f, err := tensorizer.Open(ctx, src, more.Records)
	if err != nil {
		return "", err
	}
	return encode(f.Describe())
}

// A record is a tensor of a .tensors file that is being written.
type record struct {
	Module uint16  `json:"module"`
	Type   uint8   `json:"type"`
	Name   string  `json:"name"`
	DType  string  `json:"dtype"`
	Dims   []int64 `json:"dims"`
	Bytes  int64   `json:"bytes"`
	Record int64   `json:"record"`
	Data   int64   `json:"data"`
	Sealed bool    `json:"sealed"` // the file is encrypted
}

func (r *record) item() (tensorizer.Item, error) {
	it := tensorizer.Item{Module: r.Module, Type: r.Type, Name: r.Name, Text: r.DType, Dims: r.Dims, Bytes: r.Bytes, Record: r.Record, Sealed: r.Sealed}
	return it, it.Check()
}

// memory is the caller's, of n bytes from an address.
func memory(addr uint64, n int64) []byte {
	p := uintptr(addr)
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&p))), n)
}

// dataAt is memory whose address and size came from outside.
func dataAt(addr uint64, n int64) ([]byte, error) {
	if n < 0 || n > 0 && addr == 0 {
		return nil, fault.New(fault.ErrArgument, "%d bytes at %d", n, addr)
	}
	return memory(addr, n), nil
}

// tensorsWrite writes the "items" of the JSON, whose data lie at "pointers", as
// tensorizer.Records does: "record data" of each, in a JSON list, and where the last
// one ends. The file is the descriptor "fd"; "path" is its name in errors. With
// a "key" (hex digits, made as "derive" says) items are encrypted.
func tensorsWrite(ctx context.Context, spec string) (string, error) {
	s, err := parse[struct {
		Items    []record               `json:"items"`
		Pointers []uint64               `json:"pointers"`
		FD       int                    `json:"fd"`
		Path     string                 `json:"path"`
		Offset   int64                  `json:"offset"`
		Threads  int                    `json:"threads"`
		Key      string                 `json:"key"`
		Derive   *tensorizer.Derivation `json:"derive"`
	}]("spec", spec)
	if err != nil {
		return "", err
	}
	if len(s.Pointers) != len(s.Items) || s.FD < 0 || s.Offset < 0 {
		return "", fault.New(fault.ErrArgument, "%d tensors at %d addresses, descriptor %d, offset %d", len(s.Items), len(s.Pointers), s.FD, s.Offset)
	}
	var key *tensorizer.Key
	if s.Key != "" {
		b, err := hex.DecodeString(s.Key)
		if err != nil || len(b) != 32 {
			return "", fault.New(fault.ErrArgument, "a key has 32 bytes")
		}
		key = &tensorizer.Key{Bytes: (*[32]byte)(b), Derive: s.Derive}
	}
	items, data := make([]tensorizer.Item, len(s.Items)), make([][]byte, len(s.Items))
	for i := range items {
		s.Items[i].Sealed = key != nil
		if items[i], err = s.Items[i].item(); err != nil {
			return "", err
		}
		if data[i], err = dataAt(s.Pointers[i], items[i].Bytes); err != nil {
			return "", err
		}
	}
	end, err := tensorizer.Records(ctx, s.FD, s.Path, s.Offset, items, data, key, save.Threads(s.Threads))
	if err != nil {
		return "", err
	}
	places := make([][2]int64, len(items))
	for i := range items {
		places[i] = [2]int64{items[i].Record, items[i].Data()}
	}
	return encode(struct {
		Places [][2]int64 `json:"places"`
		End    int64      `json:"end"`
	}{places, end})
}

// tensorsFront gives, in hex digits, the head and the index of a .tensors file:
// JSON with its "items" as they were written, with the "length" of the index.
func tensorsFront(_ context.Context, spec string) (string, error) {
	f, err := parse[struct {
		Items   []record `json:"items"`
		Length  int64    `json:"length"`
		Version uint32   `json:"version"`
	}]("spec", spec)
	if err != nil {
		return "", err
	}
	items := make([]tensorizer.Item, len(f.Items))
	for i := range f.Items {
		if items[i], err = f.Items[i].item(); err != nil {
			return "", err
		}
		items[i].Pad = f.Items[i].Data - items[i].Data()
	}
	if f.Length < 0 || f.Length > 1<<30 {
		return "", fault.New(fault.ErrArgument, "an index of %d bytes", f.Length)
	}
	b, err := tensorizer.Front(items, f.Version, f.Length)
	if err != nil {
		return "", err
	}
	return hex.EncodeToString(b), nil
}

// tensorsSums gives CRC32 and SHA-256 of each of the "items" of the JSON: its
// "prefix" (hex digits), and its "bytes" at its "pointer". In hex digits, as they
// are written: a JSON list of pairs.
func tensorsSums(ctx context.Context, spec string) (string, error) {
	s, err := parse[struct {
		Items []struct {
			Prefix  string `json:"prefix"`
			Pointer uint64 `json:"pointer"`
			Bytes   int64  `json:"bytes"`
		} `json:"items"`
	}]("spec", spec)
	if err != nil {
		return "", err
	}
	flows := make([]tensorizer.Flow, len(s.Items))
	for i, t := range s.Items {
		p, err := hex.DecodeString(t.Prefix)
		if err != nil {
			return "", fault.New(fault.ErrArgument, "prefix: %v", err)
		}
		flows[i] = tensorizer.Flow{Sum: tensorizer.NewSummer(p), Bytes: t.Bytes}
		if flows[i].Memory, err = dataAt(t.Pointer, t.Bytes); err != nil {
			return "", err
		}
	}
	if err := tensorizer.Run(ctx, "sums", save.Threads(0), false, flows); err != nil {
		return "", err
	}
	out := make([][2]string, len(flows))
	for i := range flows {
		crc, sha := flows[i].Sum.Sums()
		out[i] = [2]string{hex.EncodeToString(crc), hex.EncodeToString(sha)}
	}
	return encode(out)
}

// tensorsKey derives a key from the "password" (hex digits) of the JSON and its
// tensorizer.Derivation.
func tensorsKey(ctx context.Context, spec string) (string, error) {
	d, err := parse[tensorizer.Derivation]("spec", spec)
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
	key, err := d.Key(ctx, password)
	if err != nil {
		return "", err
	}
	return hex.EncodeToString(key), nil
}
