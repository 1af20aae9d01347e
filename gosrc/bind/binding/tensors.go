package binding

// This file defines the verbs that read and write tensorizer's files.

import (
	"context"
	"encoding/hex"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/tensorizer"
)

type recordsRequest struct {
	URI     string        `json:"uri"`
	Storage format.Access `json:"storage"`
}

// recordsAnswer describes a file and contains its handle. The file stays open.
type recordsAnswer struct {
	tensorizer.Description
	Handle uint64 `json:"handle"`
}

// writeRequest describes tensors to write to an open .tensors file.
type writeRequest struct {
	Items   []record `json:"items"`
	FD      int      `json:"fd"`
	Path    string   `json:"path"` // file name in errors
	Offset  int64    `json:"offset"`
	Threads int      `json:"threads"`
	// Key, in hex digits, encrypts the tensors. Derive records how it was derived.
	Key    string                 `json:"key"`
	Derive *tensorizer.Derivation `json:"derive"`
}

// written holds the offsets of each tensor's record and data, and the end of the last record.
type written struct {
	Places [][2]int64 `json:"places"`
	End    int64      `json:"end"`
}

type frontRequest struct {
	Items   []record `json:"items"` // the items that were written
	Length  int64    `json:"length"`
	Version uint32   `json:"version"`
}

type keyRequest struct {
	tensorizer.Derivation
	Password string `json:"password"` // hex digits
}

func tensorsVerbs() []*Verb {
	return []*Verb{
		started("records", "Read the records of a .tensors file, which stays open for the verb open.",
			readRecords).awaited(),
		started("write", "Write tensors to an open .tensors file, encrypted with a key.",
			tensorsWrite).awaited().tail("the address of each tensor").onCallersMemory(),
		started("front", "Return the head and the index of a .tensors file in hex digits.", tensorsFront).awaited(),
		started("sums", "Compute CRC32 and SHA-256 of byte sequences, each after a prefix in hex digits. The results "+
			"are in hex digits.", tensorsSums).awaited().
			tail("the address and size of each sequence").onCallersMemory(),
		started("key", "Derive a key from a password. Both are in hex digits.", tensorsKey).awaited(),
	}
}

func readRecords(ctx context.Context, _ *job.Job, q recordsRequest, _ []int64) (recordsAnswer, error) {
	src, err := open.With(q.Storage.Options).Open(ctx, q.URI)
	if err != nil {
		return recordsAnswer{}, err
	}
	f, err := tensorizer.Open(ctx, src, true)
	if err != nil {
		_ = src.Close()
		return recordsAnswer{}, err
	}
	return recordsAnswer{*f.Describe(), keep(&tensorizer.Opened{Source: src, File: f})}, nil
}

// A record is a tensor of a .tensors file that is being written, with the offset of its data.
type record struct {
	tensorizer.Item
	Data int64 `json:"data"`
}

func tensorsWrite(ctx context.Context, _ *job.Job, q writeRequest, n []int64) (written, error) {
	if len(n) != len(q.Items) || q.FD < 0 || q.Offset < 0 {
		return written{}, errs.New(errs.ErrArgument,
			"%d tensors do not match %d addresses, or descriptor %d or offset %d is invalid",
			len(q.Items), len(n), q.FD, q.Offset)
	}
	var key *tensorizer.Key
	if q.Key != "" {
		b, err := hex.DecodeString(q.Key)
		if err != nil || len(b) != 32 {
			return written{}, errs.New(errs.ErrArgument, "invalid key: expected 32 bytes in hex digits")
		}
		key = &tensorizer.Key{Bytes: (*[32]byte)(b), Derive: q.Derive}
	}
	items, data := make([]tensorizer.Item, len(q.Items)), make([][]byte, len(q.Items))
	for i := range items {
		var err error
		items[i] = q.Items[i].Item
		items[i].Sealed = key != nil
		if err = items[i].Check(); err != nil {
			return written{}, err
		}
		if data[i], err = dataAt(uint64(n[i]), items[i].Bytes); err != nil {
			return written{}, err
		}
	}
	end, err := tensorizer.Records(ctx, q.FD, q.Path, q.Offset, items, data, key, knob.Workers(q.Threads))
	if err != nil {
		return written{}, err
	}
	w := written{make([][2]int64, len(items)), end}
	for i := range items {
		w.Places[i] = [2]int64{items[i].Record, items[i].Data()}
	}
	return w, nil
}

func tensorsFront(_ context.Context, _ *job.Job, q frontRequest, _ []int64) (string, error) {
	items := make([]tensorizer.Item, len(q.Items))
	for i := range q.Items {
		items[i] = q.Items[i].Item
		if err := items[i].Check(); err != nil {
			return "", err
		}
		items[i].Pad = q.Items[i].Data - items[i].Data()
	}
	if q.Length < 0 || q.Length > 1<<30 {
		return "", errs.New(errs.ErrArgument, "invalid index size %d: expected 0 to 1 GiB", q.Length)
	}
	b, err := tensorizer.Front(items, q.Version, q.Length)
	return hex.EncodeToString(b), err
}

func tensorsSums(ctx context.Context, _ *job.Job, prefixes []string, n []int64) ([][2]string, error) {
	if len(n) != 2*len(prefixes) {
		return nil, errs.New(errs.ErrArgument, "expected 2 numbers for each of %d prefixes, got %d", len(prefixes),
			len(n))
	}
	flows := make([]tensorizer.Flow, len(prefixes))
	for i, prefix := range prefixes {
		p, err := hex.DecodeString(prefix)
		if err != nil {
			return nil, errs.New(errs.ErrArgument, "prefix: %v", err)
		}
		flows[i] = tensorizer.Flow{Sum: tensorizer.NewSummer(p), Bytes: n[2*i+1]}
		if flows[i].Memory, err = dataAt(uint64(n[2*i]), n[2*i+1]); err != nil {
			return nil, err
		}
	}
	if err := tensorizer.Run(ctx, "sums", knob.Workers(0), false, flows); err != nil {
		return nil, err
	}
	out := make([][2]string, len(flows))
	for i := range flows {
		crc, sha := flows[i].Sum.Sums()
		out[i] = [2]string{hex.EncodeToString(crc), hex.EncodeToString(sha)}
	}
	return out, nil
}

func tensorsKey(ctx context.Context, _ *job.Job, q keyRequest, _ []int64) (string, error) {
	password, err := hex.DecodeString(q.Password)
	if err != nil || len(password) == 0 {
		return "", errs.New(errs.ErrArgument, "the password is empty or is not in hex digits")
	}
	key, err := q.Derivation.Key(ctx, password)
	return hex.EncodeToString(key), err
}
