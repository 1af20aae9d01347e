package tensorizer

// This file reads the plain bytes of a file and decrypts them if necessary.

import (
	"context"
	"encoding/hex"
	"runtime"
	"sort"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/blocks"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// IndexOf returns the file's index for other packages. It contains plain tensors at offsets in the Source that
// SourceOf returns, where tensors without data come last. A dtype that safetensors does not have is
// errs.ErrNotSupported; with OptionBytes, the tensor is returned as bytes with one more dimension.
func IndexOf(f *File, opt map[string]string) (*tensor.Index, error) {
	if _, ok := opt[OptionBytes]; !ok {
		for i := range f.Entries {
			if err := f.Entries[i].other; err != nil {
				return nil, err
			}
		}
	}
	ix := &tensor.Index{Sources: []tensor.Source{{URI: f.URI, Size: f.Size, Format: Format, Gaps: true}}}
	at := f.Size
	if len(f.Entries) > 0 {
		ix.Sources[0].Data = f.Entries[0].Data
	}
	for _, zeros := range []bool{false, true} {
		for i := range f.Entries {
			e := &f.Entries[i]
			if (e.Bytes != e.full) != zeros {
				continue
			}
			t := tensor.Tensor{Name: e.Name, DType: e.dtype, Shape: e.shape, Bytes: e.full, Stored: e.full, Off: e.Data,
				Alias: -1, Plain: true}
			switch {
			case zeros:
				t.Off, at = at, at+e.full
			case f.Records != nil && f.Records[i].Crypt != nil:
				t.Block = f.Records[i].Crypt.Chunk
			}
			ix.Tensors = append(ix.Tensors, t)
		}
	}
	ix.Sources[0].Size = at
	return ix, nil
}

// A NotEncryptedError is the error for a key that was given for a file that is not encrypted.
type NotEncryptedError struct{ error }

// Unwrap returns the error with its class and location.
func (e *NotEncryptedError) Unwrap() error { return e.error }

// SourceOf returns the source for the offsets of IndexOf. If all bytes of the file are plain, that is src itself,
// otherwise a source that wraps and owns it. The wrapper decrypts boxes on the calling goroutine, caches the latest
// ones, and returns zeros for tensors without data. Without a key, everything except encrypted data can be read. A
// key for a file that is not encrypted is a NotEncryptedError. With OptionCRC32, the records must have been read.
func SourceOf(ctx context.Context, f *File, src source.Source, decrypt map[string]string) (source.Source, error) {
	wrong := func(format string, args ...any) error {
		return f.at("", -1, errs.New(errs.ErrCrypto, format, args...))
	}
	_, key := decrypt[OptionKey]
	_, password := decrypt[OptionPassword]
	if (key || password) && !f.Encrypted {
		return nil, &NotEncryptedError{wrong("a key was given, but the file is not encrypted")}
	}
	if _, ok := decrypt[OptionCRC32]; ok {
		var err error
		if src, err = checkSource(f, src); err != nil {
			return nil, err
		}
	}
	if password && !key {
		if err := checkKeyWork(f); err != nil {
			return nil, err
		}
	}
	s := &sealed{Source: src, size: f.Size, boxes: blocks.New[boxKey](
		int64(runtime.GOMAXPROCS(0)+2) * (2 * ChunkBytes))}
	keys := map[string]*[keyBytes]byte{} // keyed by derivation; files usually have one for all tensors
	for i := range f.Entries {
		e := &f.Entries[i]
		s.zeros = s.zeros + e.full - e.Bytes
		if f.Records == nil || f.Records[i].Crypt == nil {
			continue
		}
		c := f.Records[i].Crypt
		sp := span{off: e.Data, end: e.Data + e.Bytes, name: e.Name, crypt: c}
		id := c.Derive.identityOf()
		if sp.key = keys[id]; sp.key == nil {
			var err error
			if sp.key, err = keyOf(ctx, c.Derive, decrypt); err != nil {
				return nil, f.at(e.Name, e.Record, err)
			}
			keys[id] = sp.key
		}
		s.spans = append(s.spans, sp)
		s.boxes.Need(min(c.Chunk, e.Bytes)) // avoids decrypting a larger box again for each piece
	}
	if s.zeros == 0 && len(s.spans) == 0 {
		return src, nil
	}
	return s, nil
}

// checkKeyWork refuses a file if deriving all its keys takes more than the work that is allowed for one key. Known
// writers use one key for all tensors.
func checkKeyWork(f *File) error {
	work, derivations := uint64(0), map[string]bool{}
	for i := range f.Records {
		c := f.Records[i].Crypt
		if c == nil || c.Derive == nil || derivations[c.Derive.identityOf()] {
			continue
		}
		derivations[c.Derive.identityOf()] = true
		err := c.Derive.Check()
		if work += c.Derive.Passes * c.Derive.Memory; err == nil && work > maxKeyWork {
			err = errs.New(errs.ErrNotSupported, "deriving its %d keys takes passes over more than %d bytes in total",
				len(derivations), int64(maxKeyWork))
		}
		if err != nil {
			return f.at(f.Entries[i].Name, f.Entries[i].Record, err)
		}
	}
	return nil
}

// keyOf returns the key in settings, or the key derived from the password in settings; derive is nil if the data has
// no key derivation. It returns nil if settings contain neither.
func keyOf(ctx context.Context, derive *Derivation, settings map[string]string) (*[keyBytes]byte, error) {
	if text, ok := settings[OptionKey]; ok {
		b, err := hex.DecodeString(text)
		if err != nil || len(b) != keyBytes {
			return nil, errs.New(errs.ErrArgument, "invalid key: expected %d bytes", keyBytes)
		}
		return (*[keyBytes]byte)(b), nil
	}
	text, ok := settings[OptionPassword]
	if !ok {
		return nil, nil
	}
	if derive == nil {
		return nil, errs.New(errs.ErrCrypto,
			"a password was given, but the file was encrypted with a key that does not come from a password")
	}
	password, err := hex.DecodeString(text)
	if err != nil || len(password) == 0 {
		return nil, errs.New(errs.ErrArgument, "the password is empty or not in hex digits")
	}
	k, err := derive.Key(ctx, password)
	if err != nil {
		return nil, err
	}
	return (*[keyBytes]byte)(k), nil
}

// A span is the encrypted data of one tensor.
type span struct {
	off, end int64
	name     string
	crypt    *Crypt
	key      *[keyBytes]byte
}

// sealed is a source that decrypts encrypted data and is followed by zeros. Whole boxes are decrypted directly into
// the caller's buffer. Other boxes are cached, so that small reads do not decrypt a box again each time.
type sealed struct {
	source.Source
	size, zeros int64
	spans       []span // sorted by offset
	boxes       *blocks.Cache[boxKey]
}

type boxKey struct {
	span int
	n    int64
}

func (s *sealed) Size() int64 { return s.size + s.zeros }

// Facts returns the facts of the wrapped source without a view, because ReadAt decrypts the bytes.
func (s *sealed) Facts() source.Facts {
	f := s.Source.Facts().ReadAtOnly()
	f.Coding = s.codingAt
	if tell := f.Prefetch; tell != nil {
		f.Prefetch = func(off, n int64) {
			if off < s.size {
				tell(off, min(n, s.size-off))
			}
		}
	}
	return f
}

// codingAt returns how the data at an offset is stored: "plain", "encrypted" or "zeros".
func (s *sealed) codingAt(off int64) string {
	switch _, isEncrypted := s.spanAt(off); {
	case off >= s.size:
		return "zeros"
	case isEncrypted:
		return "encrypted"
	}
	return "plain"
}

// spanAt returns the first span that ends after an offset, and whether the offset is inside it.
func (s *sealed) spanAt(off int64) (i int, encrypted bool) {
	i = sort.Search(len(s.spans), func(i int) bool { return s.spans[i].end > off })
	return i, i < len(s.spans) && s.spans[i].off <= off
}

// ReadAt reads plain bytes; see source.Source.
func (s *sealed) ReadAt(ctx context.Context, p []byte, off int64) error {
	if off < 0 || int64(len(p)) > s.Size()-off {
		return s.Source.ReadAt(ctx, p, off) // returns the error
	}
	for len(p) > 0 {
		i, isEncrypted := s.spanAt(off)
		n := int64(len(p))
		switch {
		case off >= s.size:
			clear(p)
		case isEncrypted:
			sp := &s.spans[i]
			n = min(n, sp.end-off)
			if err := s.open(ctx, p[:n], i, off-sp.off); err != nil {
				return err
			}
		default:
			n = min(n, s.size-off)
			if i < len(s.spans) {
				n = min(n, s.spans[i].off-off)
			}
			if err := s.Source.ReadAt(ctx, p[:n], off); err != nil {
				return err
			}
		}
		p, off = p[n:], off+n
	}
	return nil
}

// open fills p with the plain bytes of span i from offset off in the span.
func (s *sealed) open(ctx context.Context, p []byte, i int, off int64) error {
	sp := &s.spans[i]
	for len(p) > 0 {
		k := off / sp.crypt.Chunk
		from := k * sp.crypt.Chunk
		size := min(sp.crypt.Chunk, sp.end-sp.off-from)
		if off == from && int64(len(p)) >= size {
			if err := s.decryptBox(ctx, p[:size], i, k); err != nil {
				return err
			}
			p, off = p[size:], off+size
			continue
		}
		b, err := s.boxes.Get(ctx, boxKey{i, k}, func() ([]byte, error) {
			data := make([]byte, size)
			return data, s.decryptBox(ctx, data, i, k)
		})
		if err != nil {
			return err
		}
		n := copy(p, b.Data[off-from:])
		s.boxes.Put(b)
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// decryptBox reads one whole box into dst.
func (s *sealed) decryptBox(ctx context.Context, dst []byte, i int, k int64) error {
	sp := &s.spans[i]
	at := sp.off + k*sp.crypt.Chunk
	fail := func(err error) error {
		return &errs.At{Verb: "decrypt", Source: s.URI(), Tensor: sp.name, Chunk: k, Offset: at, Err: err}
	}
	if sp.key == nil {
		return fail(errs.New(errs.ErrCrypto, "the tensor is encrypted, but no key was given"))
	}
	if err := s.Source.ReadAt(ctx, dst, at); err != nil {
		return err
	}
	if err := sp.crypt.open(dst, k, sp.key); err != nil {
		clear(dst) // do not leak bytes that failed the check
		return fail(err)
	}
	return nil
}
