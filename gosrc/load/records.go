package load

import (
	"context"
	"encoding/hex"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/format/tensors"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
)

// A TensorsFile is what Records tells of a .tensors file, in its own words.
type TensorsFile struct {
	URI       string          `json:"uri"`
	Version   uint32          `json:"version"`
	Encrypted bool            `json:"encrypted"`
	Total     int64           `json:"total"` // bytes of data
	Size      int64           `json:"size"`
	Entries   []TensorsRecord `json:"entries"`
}

// A TensorsRecord is one of its tensors. What stands in the record itself is
// there only if it was asked for.
type TensorsRecord struct {
	Name   string  `json:"name"`
	Type   uint8   `json:"type"`
	DType  string  `json:"dtype"`
	Dims   []int64 `json:"dims"`
	Record int64   `json:"record"`
	Data   int64   `json:"data"`
	Bytes  int64   `json:"bytes"`

	Module uint16              `json:"module"`
	Prefix []byte              `json:"prefix,omitempty"`
	CRC32  string              `json:"crc32,omitempty"`
	SHA256 string              `json:"sha256,omitempty"`
	Sealed bool                `json:"sealed"`
	Derive *tensors.Derivation `json:"derive,omitempty"`
}

// Records reads the head and the index of a .tensors file, and its records if
// they are asked for, or the file is encrypted. Without a look at any data.
func Records(ctx context.Context, uri string, storage source.Options, records bool) (*TensorsFile, error) {
	src, err := open.With(storage)(ctx, uri)
	if err != nil {
		return nil, err
	}
	defer src.Close()
	head, err := safetensors.Head(ctx, src)
	if err != nil {
		return nil, err
	}
	if !tensors.Is(head) {
		return nil, &fault.At{Verb: "index", Source: uri, Chunk: -1, Offset: 0, Err: fault.New(fault.ErrFormat, "not a .tensors file")}
	}
	f, err := tensors.Read(ctx, src, head)
	if err == nil && records {
		err = f.ReadRecords(ctx, src)
	}
	if err != nil {
		return nil, err
	}
	out := &TensorsFile{URI: fault.Redact(uri), Version: f.Version, Encrypted: f.Encrypted, Total: f.Total, Size: f.Size,
		Entries: make([]TensorsRecord, len(f.Entries))}
	for i := range f.Entries {
		e := &f.Entries[i]
		r := TensorsRecord{Name: e.Name, Type: e.Type, DType: e.Text, Dims: e.Dims, Record: e.Record, Data: e.Data, Bytes: e.Bytes}
		if f.Records != nil {
			rec := &f.Records[i]
			r.Module, r.Prefix = rec.Module, rec.Prefix
			r.CRC32, r.SHA256 = hex.EncodeToString(rec.CRC32), hex.EncodeToString(rec.SHA256)
			if rec.Crypt != nil {
				r.Sealed, r.Derive = true, rec.Crypt.Derive
			}
		}
		out.Entries[i] = r
	}
	return out, nil
}
