package digest

import (
	"context"
	"encoding/binary"
	"math/big"
	"slices"
	"testing"
	"unsafe"
)

// keyedOf returns the keyed digest of contiguous bytes.
func keyedOf(t *testing.T, key *Key, p []byte) Sum {
	v := Contiguous(uint64(uintptr(unsafe.Pointer(unsafe.SliceData(p)))), int64(len(p)))
	sums, err := All(t.Context(), []View{v}, 2, key)
	if err != nil {
		t.Fatal(err)
	}
	return sums[0]
}

// keyedTwin computes the keyed digest by its definition, with big integers.
func keyedTwin(key *Key, p []byte) Sum {
	one := big.NewInt(1)
	ring := new(big.Int).Lsh(one, 64)
	add := func(s *State, v, w uint64) {
		product := new(big.Int).Mul(new(big.Int).SetUint64(v), new(big.Int).SetUint64(w))
		high, low := new(big.Int).QuoRem(product, ring, new(big.Int))
		s.Merge(State{low.Uint64(), high.Uint64()})
	}
	padded := make([]byte, (len(p)+4095)/4096*4096)
	copy(padded, p)
	var all State
	for r := range len(padded) / 128 {
		tile, lane := r/32, r%32
		var row State
		for k := range 8 {
			at := 8 * (512*tile + 64*k + 2*lane)
			add(&row, binary.LittleEndian.Uint64(padded[at:])+key[2*k],
				binary.LittleEndian.Uint64(padded[at+8:])+key[2*k+1])
		}
		add(&all, row.A+mixWord(key[16]+uint64(r)*stepA), row.B+mixWord(key[17]+uint64(r)*stepA))
	}
	return all.Sum(int64(len(p)))
}

// For any length, the keyed digest matches its definition. It depends on the key.
func TestKeyedTwins(t *testing.T) {
	r := random(t)
	data := make([]byte, 9<<20)
	for i := 0; i < len(data); i += 8 {
		binary.LittleEndian.PutUint64(data[i:], r.Uint64())
	}
	key, other := NewKey(), NewKey()
	lengths := []int{1, 7, 8, 4095, 4096, 4097, share, share + 1, 2*share - 8, len(data) - 64}
	for range 30 {
		lengths = append(lengths, 1+r.IntN(20000))
	}
	for _, n := range lengths {
		p := data[r.IntN(64):][:n]
		got := keyedOf(t, key, p)
		if want := keyedTwin(key, p); got != want {
			t.Errorf("%d bytes: %v, want %v with key %v", n, got, want, *key)
		}
		if got == keyedOf(t, other, p) || got == Of(p) {
			t.Errorf("%d bytes: the digest %v does not depend on the key", n, got)
		}
	}
}

// A strided tensor has the keyed digest of its contiguous copy.
func TestKeyedViews(t *testing.T) {
	const rows, columns = 300, 70
	data := bytesOf(2 * rows * columns)
	v := View{uint64(uintptr(unsafe.Pointer(&data[0]))), 2, []int64{columns, rows}, []int64{2, 2 * columns}}
	var copied []byte
	for c := range columns {
		for r := range rows {
			copied = append(copied, data[2*(r*columns+c):][:2]...)
		}
	}
	key := NewKey()
	sums, err := All(t.Context(), []View{v}, 2, key)
	if err != nil || sums[0] != keyedOf(t, key, copied) {
		t.Error(sums, err)
	}
}

// Two tensors that were constructed to have the same digest have different keyed digests. The keyed digest also changes
// if rows, tiles, words or zeros are exchanged, and with every changed bit.
func TestKeyedDigestsOfHostileTensors(t *testing.T) {
	key := NewKey()
	base := bytesOf(3 * tileBytes)
	clear(base[tileBytes : tileBytes+512])
	want := keyedOf(t, key, base)
	seen := map[Sum]string{want: "the tensor"}
	add := func(p []byte, what string) {
		sum := keyedOf(t, key, p)
		if other, isTwice := seen[sum]; isTwice {
			t.Errorf("%s has the keyed digest of %s", what, other)
		}
		seen[sum] = what
	}
	hostile := slices.Clone(base)
	exchangeSums(hostile, 5, 900)
	if Of(hostile) != Of(base) {
		t.Fatal("the constructed tensor has a different digest")
	}
	add(hostile, "the constructed tensor")
	exchange := func(i, j, n int, what string) {
		p := slices.Clone(base)
		copy(p[i:i+n], base[j:])
		copy(p[j:j+n], base[i:])
		add(p, what)
	}
	exchange(0, 2*tileBytes, tileBytes, "exchanged tiles")
	exchange(16, 32, 16, "exchanged pairs of two rows")
	exchange(16, 512+16, 16, "exchanged pairs of one row")
	exchange(64, 72, 8, "exchanged words of a pair")
	for i := range 8 * tileBytes / 4 {
		p := slices.Clone(base)
		p[i/8+tileBytes] ^= 1 << (i % 8)
		add(p, "a changed bit")
	}
	for n := range 40 {
		add(base[:tileBytes+n], "a shorter tensor with other zeros at its end")
	}
}

// exchangeSums changes words i and j so that their summands are exchanged. The digest does not change.
func exchangeSums(p []byte, i, j int) {
	v, w := p[WordBytes*i:], p[WordBytes*j:]
	x, y := binary.LittleEndian.Uint64(v), binary.LittleEndian.Uint64(w)
	distance := uint64(j-i) * stepA
	binary.LittleEndian.PutUint64(v, y+distance)
	binary.LittleEndian.PutUint64(w, x-distance)
}

// The process has one key, which no other process can know.
func TestProcessKey(t *testing.T) {
	key, other := ProcessKey(), NewKey()
	if key != ProcessKey() || *key == *other || slices.Contains(other[:], 0) {
		t.Error("keys are not random")
	}
}

func BenchmarkKeyed(b *testing.B) {
	p, key := make([]byte, 1<<20), NewKey()
	b.SetBytes(int64(len(p)))
	v := []View{Contiguous(uint64(uintptr(unsafe.Pointer(&p[0]))), int64(len(p)))}
	for b.Loop() {
		if _, err := All(context.Background(), v, 1, key); err != nil {
			b.Fatal(err)
		}
	}
}
