// Package sha256 makes SHA-256 of several messages at once: a core that has
// AVX-512 does sixteen in the time of seven, since SHA-256 cannot do two blocks
// of one message at once. The slow twin is crypto/sha256, whose hashes these are.
package sha256

import (
	"cmp"
	"crypto/sha256"
	"encoding"
	"encoding/binary"
	"hash"
	"slices"
	"unsafe"
)

// Lanes is how many messages are hashed at once at most.
const Lanes = 16

// few is up to how many messages are hashed sooner one after the other, by the
// processor's own instructions for SHA-256.
const few = 7

// burst is how many blocks of each message are hashed between two moments in
// which the goroutine can be stopped: 0.2 ms.
const burst = 512

// What crypto/sha256 makes of a hash that it marshals: magic, state, the bytes
// that are no whole block yet, how many bytes there were.
const (
	magic      = "sha\x03"
	stateAt    = len(magic)
	pendingAt  = stateAt + sha256.Size
	lengthAt   = pendingAt + sha256.BlockSize
	marshalled = lengthAt + 8
)

// New is crypto/sha256's.
func New() hash.Hash { return sha256.New() }

// Together says whether Write gains anything with so many messages on this
// processor.
func Together(messages int) bool { return fast && messages > few }

// Write does hashes[i].Write(data[i]) for every i. The hashes are New's, each of
// its own; pieces may have any lengths, the fastest are long and alike.
func Write(hashes []hash.Hash, data [][]byte) {
	if Together(len(hashes)) {
		order := make([]int, len(hashes))
		for i := range order {
			order[i] = i
		}
		// The longest first: those of a group are alike then.
		slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(len(data[b]), len(data[a])) })
		data = slices.Clone(data)
		for group := range slices.Chunk(order, Lanes) {
			together(hashes, data, group)
		}
	}
	for i, h := range hashes {
		_, _ = h.Write(data[i]) // cannot fail
	}
}

// together takes from the front of the group's data what more than a few of them
// have in common; the group is sorted by length, the longest first.
func together(hashes []hash.Hash, data [][]byte, group []int) {
	var g lanes
	for _, i := range group {
		if len(data[i]) < 2*sha256.BlockSize {
			break
		}
		g.take(hashes[i], &data[i])
	}
	for g.n > few {
		least := len(*g.data[0])
		for i := range g.n {
			least = min(least, len(*g.data[i]))
		}
		g.run(least / sha256.BlockSize)
		for i := g.n - 1; i >= 0; i-- {
			if len(*g.data[i]) < sha256.BlockSize {
				g.give(i)
			}
		}
	}
	for g.n > 0 {
		g.give(g.n - 1)
	}
}

// lanes are the messages that are hashed together.
type lanes struct {
	state  [8][Lanes]uint32
	from   [Lanes]unsafe.Pointer
	n      int
	hash   [Lanes]hash.Hash
	data   [Lanes]*[]byte
	length [Lanes]uint64
	buf    [marshalled]byte
}

// take puts a hash into the next lane, once it is at the beginning of a block.
func (g *lanes) take(h hash.Hash, data *[]byte) {
	b, err := h.(encoding.BinaryAppender).AppendBinary(g.buf[:0])
	if err == nil {
		if part := int(binary.BigEndian.Uint64(b[lengthAt:]) % sha256.BlockSize); part > 0 {
			n := sha256.BlockSize - part
			_, _ = h.Write((*data)[:n])
			*data = (*data)[n:]
			b, err = h.(encoding.BinaryAppender).AppendBinary(g.buf[:0])
		}
	}
	if err != nil || len(b) != marshalled || string(b[:stateAt]) != magic {
		panic("sha256: crypto/sha256 marshals its hashes in another way")
	}
	for i := range g.state {
		g.state[i][g.n] = binary.BigEndian.Uint32(b[stateAt+4*i:])
	}
	g.length[g.n] = binary.BigEndian.Uint64(b[lengthAt:])
	g.hash[g.n], g.data[g.n] = h, data
	g.n++
}

// run hashes n blocks of every lane.
func (g *lanes) run(n int) {
	for n > 0 {
		k := min(n, burst)
		for i := range g.from {
			g.from[i] = unsafe.Pointer(unsafe.SliceData(*g.data[min(i, g.n-1)])) // lanes without a message do another's, for nothing
		}
		blocks(&g.state, &g.from, k)
		for i := range g.n {
			*g.data[i] = (*g.data[i])[k*sha256.BlockSize:]
			g.length[i] += uint64(k) * sha256.BlockSize
		}
		n -= k
	}
}

// give makes lane i's hash what it has become; the last lane comes in its place.
func (g *lanes) give(i int) {
	b := g.buf[:]
	clear(b)
	copy(b, magic)
	for k := range g.state {
		binary.BigEndian.PutUint32(b[stateAt+4*k:], g.state[k][i])
	}
	binary.BigEndian.PutUint64(b[lengthAt:], g.length[i])
	if err := g.hash[i].(encoding.BinaryUnmarshaler).UnmarshalBinary(b); err != nil {
		panic(err)
	}
	g.n--
	for k := range g.state {
		g.state[k][i] = g.state[k][g.n]
	}
	g.hash[i], g.data[i], g.length[i] = g.hash[g.n], g.data[g.n], g.length[g.n]
}
