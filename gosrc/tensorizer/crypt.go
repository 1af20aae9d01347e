package tensorizer

// This file encrypts and decrypts records: keys, nonces and boxes.

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"sync"

	"golang.org/x/crypto/argon2"
	//lint:ignore SA1019 the format's own authenticator, with a separate key for each box
	"golang.org/x/crypto/poly1305"
	//lint:ignore SA1019 the format's own cipher
	"golang.org/x/crypto/salsa20/salsa"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/hostmem"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/internal/sodium"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// ChunkBytes is the number of bytes in one box. A box's nonce is the tensor's nonce plus the box's number.
const ChunkBytes = 2 << 20

const (
	keyBytes   = 32
	nonceBytes = 24
	macBytes   = 16
	saltBytes  = 16

	chunkKey, chunkParallel, chunkSequential = 1, 2, 3
	methodPassword                           = 1
	argon2id13                               = 2

	minKeyMemory = 8 << 10 // libsodium's minimum
	maxKeyMemory = 4 << 30
	maxKeyPasses = 1 << 10
	maxKeyWork   = 64 << 30 // passes times memory: one or two minutes, 16 times libsodium's "sensitive"

	moderatePasses, moderateMemory = 3, 256 << 20
)

// A Derivation holds the parameters to derive a key from a password with Argon2id 1.3 and one lane.
type Derivation struct {
	Passes uint64 `json:"passes"` // opslimit
	Memory uint64 `json:"memory"` // memlimit, in bytes
	Salt   []byte `json:"salt"`
}

// Check checks a derivation against the limits of libsodium and of this package, so that a file cannot demand
// unlimited memory or time.
func (d Derivation) Check() error {
	if d.Passes < 1 || d.Memory < minKeyMemory || len(d.Salt) != saltBytes {
		return errs.New(errs.ErrCrypto, "invalid key derivation: %d passes over %d bytes, a salt of %d bytes", d.Passes,
			d.Memory, len(d.Salt))
	}
	if d.Passes > maxKeyPasses || d.Memory > maxKeyMemory {
		return errs.New(errs.ErrNotSupported, "the key derivation takes %d passes over %d bytes, but at most "+
			"%d over %d are allowed",
			d.Passes, d.Memory, maxKeyPasses, int64(maxKeyMemory))
	}
	if d.Passes*d.Memory > maxKeyWork {
		return errs.New(errs.ErrNotSupported,
			"the key derivation takes %d passes over %d bytes, but at most %d bytes in total are allowed",
			d.Passes, d.Memory, int64(maxKeyWork))
	}
	return nil
}

// identityOf returns a string that is equal for equal derivations. d may be nil.
func (d *Derivation) identityOf() string {
	if d == nil {
		return ""
	}
	return string(le.AppendUint64(le.AppendUint64(nil, d.Passes), d.Memory)) + string(d.Salt)
}

// deriving has an element while a derivation runs. Only one derivation runs at a time, to limit the memory of
// abandoned ones.
var deriving = make(chan struct{}, 1)

// available returns how many bytes a derivation may use.
var available = hostmem.Available

// Key derives the key from a password. It needs d.Memory bytes and takes about a second for 256 MiB. If the host has
// less memory, the error is errs.ErrMemory. When ctx ends, Key returns immediately, but the derivation cannot be
// stopped: it continues in the background.
func (d Derivation) Key(ctx context.Context, password []byte) ([]byte, error) {
	if err := d.Check(); err != nil {
		return nil, err
	}
	if most := available(); int64(d.Memory) > most {
		return nil, errs.New(errs.ErrMemory, "deriving the key from the password takes %d bytes of memory, but "+
			"only %d bytes are free",
			d.Memory, most)
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	select {
	case deriving <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	keys := make(chan []byte, 1)
	spawn.Go("key derivation", func() {
		defer func() { <-deriving }()
		defer close(keys)
		keys <- argon2.IDKey(password, d.Salt, uint32(d.Passes), uint32(d.Memory/1024), 1, keyBytes)
	})
	select {
	case key, ok := <-keys:
		if !ok {
			return nil, errs.New(errs.ErrEngine, "the key derivation ended without a key")
		}
		return key, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// A Crypt describes how a tensor's data is encrypted.
type Crypt struct {
	Derive *Derivation // nil if the key was not derived from a password
	Chunk  int64       // bytes per box
	Said   int64       // bytes per box as stated in the file; meaningless for a single box
	Nonce  [nonceBytes]byte
	MACs   [][macBytes]byte
}

// parseCrypt parses the encryption of a record with the given number of data bytes. It returns nil if the data is not
// encrypted.
func parseCrypt(b []byte, bytes int64) (*Crypt, error) {
	early := errs.New(errs.ErrFormat, "the encryption of the record ends early")
	r := reader{b: b}
	var c Crypt
	boxes := false
	for range r.readUint(2) {
		n := r.readUint(8) // bytes of kind and body
		if r.short || n > uint64(len(b)) {
			return nil, early
		}
		body := reader{b: r.takeBytes(int(n))}
		kind := body.readUint(2)
		if body.short {
			return nil, early
		}
		switch kind {
		case chunkKey:
			if method := body.readUint(2); method != methodPassword && !body.short {
				return nil, errs.New(errs.ErrNotSupported, "unsupported key derivation method %d", method)
			}
			d := Derivation{Passes: body.readUint(8), Memory: body.readUint(8)}
			if alg := body.readUint(4); alg != argon2id13 && !body.short {
				return nil, errs.New(errs.ErrNotSupported, "unsupported password hash %d", alg)
			}
			d.Salt = append([]byte(nil), body.takeBytes(int(body.readUint(2)))...)
			c.Derive = &d
		case chunkParallel:
			size := body.readUint(8)
			copy(c.Nonce[:], body.takeBytes(nonceBytes))
			count := body.readUint(8)
			if body.short || count > uint64(len(body.b)-body.p)/macBytes {
				return nil, early
			}
			c.MACs = make([][macBytes]byte, count)
			for i := range c.MACs {
				copy(c.MACs[i][:], body.takeBytes(macBytes))
			}
			c.Said = int64(size)
			if c.Chunk = c.Said; count == 1 {
				c.Chunk = bytes
			}
			if size < 1024 || size%64 != 0 || c.Chunk <= 0 || count == 0 ||
				sizes.CeilDiv(bytes, c.Chunk) != int64(count) {
				return nil, errs.New(errs.ErrFormat, "%d encrypted chunks of %d bytes do not match %d data "+
					"bytes", count, size, bytes)
			}
			boxes = true
		case chunkSequential:
			c.MACs = make([][macBytes]byte, 1)
			copy(c.Nonce[:], body.takeBytes(nonceBytes))
			copy(c.MACs[0][:], body.takeBytes(macBytes))
			c.Chunk = bytes
			boxes = true
		default:
			return nil, errs.New(errs.ErrNotSupported, "unsupported encryption kind %d", kind)
		}
		if body.short {
			return nil, early
		}
	}
	if r.short {
		return nil, early
	}
	if !boxes || bytes == 0 {
		return nil, nil
	}
	return &c, nil
}

// nonceOf returns the nonce of box i: the tensor's nonce plus i, as a number of 24 bytes.
func (c *Crypt) nonceOf(i int64) *[nonceBytes]byte {
	n := c.Nonce
	carry := uint64(i)
	for k := range n {
		carry += uint64(n[k])
		n[k] = byte(carry)
		carry >>= 8
	}
	return &n
}

// open decrypts box i in place. After an error, the contents of p are undefined.
func (c *Crypt) open(p []byte, i int64, key *[keyBytes]byte) error {
	if !boxes().open(p, &c.MACs[i], c.nonceOf(i), key) {
		return errs.New(errs.ErrCrypto, "decryption failed: the key is wrong, or the data has changed")
	}
	return nil
}

// NewCrypt returns the encryption of the given number of bytes, with a new nonce. Seal must then encrypt each box.
func NewCrypt(bytes int64, derive *Derivation) *Crypt {
	c := &Crypt{Derive: derive, Chunk: ChunkBytes, Said: ChunkBytes,
		MACs: make([][macBytes]byte, sizes.CeilDiv(bytes, ChunkBytes))}
	_, _ = rand.Read(c.Nonce[:]) // cannot fail
	return c
}

// Seal encrypts box i in place. It must be called once for each box. It is safe for concurrent use.
func (c *Crypt) Seal(p []byte, i int64, key *[keyBytes]byte) {
	c.MACs[i] = boxes().seal(p, c.nonceOf(i), key)
}

// A Key encrypts a whole file.
type Key struct {
	Bytes  *[keyBytes]byte
	Derive *Derivation // how the key was derived; nil if it was not
}

// KeyOf returns the key for a file to write: from OptionKey, or from OptionPassword with a new salt and libsodium's
// moderate limits (256 MiB, about a second). It returns nil if the options have neither.
func KeyOf(ctx context.Context, opt map[string]string) (*Key, error) {
	var d *Derivation
	if _, ok := opt[OptionKey]; !ok {
		d = &Derivation{Passes: moderatePasses, Memory: moderateMemory, Salt: make([]byte, saltBytes)}
		_, _ = rand.Read(d.Salt) // cannot fail
	}
	k, err := keyOf(ctx, d, opt)
	if k == nil {
		return nil, err
	}
	return &Key{Bytes: k, Derive: d}, nil
}

// appendBox appends the encryption of a record, preceded by its length. A nil Crypt means that the record is not
// encrypted.
func (c *Crypt) appendBox(dst []byte) []byte {
	start := len(dst)
	dst = le.AppendUint64(dst, 0)
	switch {
	case c == nil:
		dst = le.AppendUint16(dst, 0)
	case c.Derive == nil:
		dst = le.AppendUint16(dst, 1)
	default:
		dst = le.AppendUint16(dst, 2)
		dst = le.AppendUint64(dst, uint64(2+2+8+8+4+2+len(c.Derive.Salt)))
		dst = le.AppendUint16(dst, chunkKey)
		dst = le.AppendUint16(dst, methodPassword)
		dst = le.AppendUint64(dst, c.Derive.Passes)
		dst = le.AppendUint64(dst, c.Derive.Memory)
		dst = le.AppendUint32(dst, argon2id13)
		dst = le.AppendUint16(dst, uint16(len(c.Derive.Salt)))
		dst = append(dst, c.Derive.Salt...)
	}
	if c != nil {
		dst = le.AppendUint64(dst, uint64(2+8+nonceBytes+8+macBytes*len(c.MACs)))
		dst = le.AppendUint16(dst, chunkParallel)
		dst = le.AppendUint64(dst, uint64(c.Chunk))
		dst = append(dst, c.Nonce[:]...)
		dst = le.AppendUint64(dst, uint64(len(c.MACs)))
		for i := range c.MACs {
			dst = append(dst, c.MACs[i][:]...)
		}
	}
	le.PutUint64(dst[start:], uint64(len(dst)-start-8))
	return dst
}

// A box is libsodium's secretbox with a separate MAC: XSalsa20-Poly1305. If libsodium is installed, it encrypts and
// decrypts boxes, three times as fast as the fallback, x/crypto. (tensorizer itself requires libsodium.) The fallback
// uses the two primitives in place, because x/crypto's secretbox needs a second buffer.

// cipher encrypts and decrypts boxes.
type cipher struct {
	name string
	seal func(p []byte, nonce *[nonceBytes]byte, key *[keyBytes]byte) [macBytes]byte
	open func(p []byte, mac *[macBytes]byte, nonce *[nonceBytes]byte, key *[keyBytes]byte) bool
}

var boxes = sync.OnceValue(func() cipher {
	if version := sodium.Version(); version != "" {
		return cipher{"libsodium " + version, sodium.Seal, sodium.Open}
	}
	return cipher{"golang.org/x/crypto; installing libsodium makes this three times as fast", sealBox, openBox}
})

// Cipher returns the name of the library that encrypts and decrypts.
func Cipher() string { return boxes().name }

// keystream is the key stream of a box. Its first 32 bytes are the authentication key; the rest encrypts the data.
type keystream struct {
	key     [32]byte
	counter [16]byte // nonce and block number
	first   [64]byte
}

func newKeystream(nonce *[nonceBytes]byte, key *[keyBytes]byte) *keystream {
	var k keystream
	salsa.HSalsa20(&k.key, (*[16]byte)(nonce[:16]), key, &salsa.Sigma)
	copy(k.counter[:8], nonce[16:])
	salsa.XORKeyStream(k.first[:], k.first[:], &k.counter, &k.key)
	return &k
}

// xorStream encrypts or decrypts p in place.
func (k *keystream) xorStream(p []byte) {
	n := subtle.XORBytes(p, p, k.first[32:])
	counter := k.counter
	counter[8] = 1
	salsa.XORKeyStream(p[n:], p[n:], &counter, &k.key)
}

func (k *keystream) authKey() *[32]byte { return (*[32]byte)(k.first[:32]) }

// sealBox encrypts p in place and returns the MAC.
func sealBox(p []byte, nonce *[nonceBytes]byte, key *[keyBytes]byte) (mac [macBytes]byte) {
	k := newKeystream(nonce, key)
	k.xorStream(p)
	poly1305.Sum(&mac, p, k.authKey())
	return mac
}

// openBox decrypts p in place if the MAC matches, and reports whether it does.
func openBox(p []byte, mac *[macBytes]byte, nonce *[nonceBytes]byte, key *[keyBytes]byte) bool {
	k := newKeystream(nonce, key)
	if !poly1305.Verify(mac, p, k.authKey()) {
		return false
	}
	k.xorStream(p)
	return true
}
