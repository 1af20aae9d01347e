package delta

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/crc32c"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A model is a list of named tensors in memory.
type model struct {
	names  []string
	dtypes []tensor.DType
	shapes [][]int64
	data   [][]byte
}

func (m *model) add(r *rand.Rand, name string, d tensor.DType, shape ...int64) {
	n, err := tensor.Size(d, shape)
	if err != nil {
		panic(err)
	}
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	m.names, m.dtypes, m.shapes, m.data = append(m.names, name), append(m.dtypes, d), append(m.shapes, shape),
		append(m.data, b)
}

func (m *model) clone() *model {
	c := *m
	c.data = nil
	for _, b := range m.data {
		c.data = append(c.data, bytes.Clone(b))
	}
	return &c
}

// step changes about the given share of a tensor's bytes.
func (m *model) step(r *rand.Rand, i int, share float64) {
	for k := range m.data[i] {
		if r.Float64() < share {
			m.data[i][k] ^= byte(1 + r.Uint32()%3)
		}
	}
}

func address(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

func pairs(now, base *model) []Pair {
	var all []Pair
	for i := range now.names {
		all = append(all, Pair{Name: now.names[i], DType: now.dtypes[i], Shape: now.shapes[i],
			New: address(now.data[i]), Base: address(base.data[i])})
	}
	return all
}

func (m *model) targets() []Target {
	var all []Target
	for i := range m.names {
		all = append(all, Target{Name: m.names[i], DType: m.dtypes[i], Shape: m.shapes[i], At: address(m.data[i])})
	}
	return all
}

func (m *model) same(o *model) bool {
	for i := range m.data {
		if !bytes.Equal(m.data[i], o.data[i]) {
			return false
		}
	}
	return true
}

// mixed returns a model with tensors of every width: large, empty and tied ones.
func mixed(r *rand.Rand) *model {
	m := &model{}
	m.add(r, "z.big", tensor.BF16, 700, 513)
	m.add(r, "a.f32", tensor.F32, 1000)
	m.add(r, "b.int8", tensor.I8, 300_001)
	m.add(r, "c.f64", tensor.F64, 77)
	m.add(r, "d.none", tensor.F16, 0, 5)
	m.add(r, "e.f4", tensor.F4, 2, 3)
	m.add(r, "f.same", tensor.U16, 4096)
	m.add(r, "g.scalar", tensor.C64)
	m.names, m.dtypes, m.shapes, m.data = append(m.names, "tied"), append(m.dtypes, tensor.BF16),
		append(m.shapes, []int64{513 * 700}), append(m.data, m.data[0])
	return m
}

func encode(t *testing.T, now, base *model) *File {
	t.Helper()
	f, err := Encode(context.Background(), pairs(now, base), map[string]string{"step": "1"}, 2, func(int64) {})
	runtime.KeepAlive(now) // pairs hold only addresses
	runtime.KeepAlive(base)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func layOutFile(t *testing.T, f *File) []byte {
	t.Helper()
	table, err := encodeTable(f)
	if err != nil {
		t.Fatal(err)
	}
	pieces, err := layOut(f, table)
	if err != nil {
		t.Fatal(err)
	}
	b := bytes.Join(pieces, nil)
	if int64(len(b)) != f.Size {
		t.Fatalf("got %d bytes, want %d", len(b), f.Size)
	}
	return b
}

func reparse(t *testing.T, b []byte) *File {
	t.Helper()
	f, err := Parse(context.Background(), "d.safetensors", b)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func applySteps(m *model, chain ...*File) error {
	_, err := Apply(context.Background(), chain, m.targets(), false, 2, Whole)
	runtime.KeepAlive(m)
	return err
}

func seeded(t *testing.T) *rand.Rand {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 2))
}

// trained returns a model (base) and a changed version of it (now).
func trained(r *rand.Rand) (now, base *model) {
	base = mixed(r)
	now = base.clone()
	now.data[len(now.data)-1] = now.data[0] // also tied
	now.step(r, 0, 0.01)
	now.step(r, 1, 0.9)
	now.data[2][262_144] ^= 0xff
	now.step(r, 3, 0.3)
	now.step(r, 5, 1)
	now.step(r, 7, 1)
	return now, base
}

// TestFile checks that a delta round-trips through its file, turns the base into the new model, contains both digests
// of each tensor, stores tied tensors once, and is reproducible.
func TestFile(t *testing.T) {
	now, base := trained(seeded(t))
	f := encode(t, now, base)
	b := layOutFile(t, f)
	if again := layOutFile(t, encode(t, now, base)); !bytes.Equal(again, b) {
		t.Error("two files of the same models differ")
	}
	g := reparse(t, b)
	if !bytes.Equal(layOutFile(t, g), b) || g.Metadata["step"] != "1" || len(g.Metadata) != 1 {
		t.Error("the file does not round-trip")
	}
	for i := range now.names {
		at, ok := g.Find(now.names[i])
		if !ok {
			t.Fatalf("%s is missing", now.names[i])
		}
		x := &g.Tensors[at]
		if x.Base != digest.Of(base.data[i]) || x.New != digest.Of(now.data[i]) {
			t.Errorf("%s has the digests %v and %v", x.Name, x.Base, x.New)
		}
		if now.names[i] == "f.same" && len(x.Chunks) != 0 || now.names[i] == "z.big" && x.Same < 0 {
			t.Errorf("%s: %d chunks, same as %d", x.Name, len(x.Chunks), x.Same)
		}
		if now.names[i] == "b.int8" && (len(x.Chunks[0]) != 0 || len(x.Chunks[1]) == 0) {
			t.Error("an unchanged chunk was stored")
		}
	}
	got := base.clone()
	got.data[len(got.data)-1] = got.data[0]
	if err := applySteps(got, g); err != nil || !got.same(now) {
		t.Fatalf("the delta gives wrong bytes: %v", err)
	}
	if err := applySteps(got, g); !errors.Is(err, errs.ErrBase) || !strings.Contains(err.Error(), "already") ||
		!got.same(now) {
		t.Errorf("applied twice: %v", err)
	}
}

// TestRefusedBeforeAnyChange checks that a wrong base, shape or name, and overlapping memory are refused before any
// byte changes.
func TestRefusedBeforeAnyChange(t *testing.T) {
	now, base := trained(seeded(t))
	f := reparse(t, layOutFile(t, encode(t, now, base)))
	other := base.clone()
	other.data[6][9]++ // in a tensor that the delta does not change
	before := other.clone()
	if err := applySteps(other, f); !errors.Is(err, errs.ErrBase) || !strings.Contains(err.Error(), `"f.same"`) ||
		!strings.Contains(err.Error(), "delta "+f.URI) || !other.same(before) {
		t.Errorf("a wrong base: %v", err)
	}
	run := func(change func(all []Target) []Target, missing bool) error {
		m := base.clone()
		defer runtime.KeepAlive(m)
		_, err := Apply(context.Background(), []*File{f}, change(m.targets()), missing, 2, Whole)
		if err != nil && !m.same(base) {
			t.Error("refused, but tensors were changed")
		}
		return err
	}
	if err := run(func(all []Target) []Target {
		all[0].Shape = []int64{513, 700}
		return all
	}, false); !errors.Is(err, errs.ErrBase) {
		t.Errorf("a different shape: %v", err)
	}
	less := func(all []Target) []Target { return all[1:] }
	if err := run(less, false); !errors.Is(err, errs.ErrArgument) || !strings.Contains(err.Error(), "z.big") {
		t.Errorf("a missing tensor: %v", err)
	}
	if err := run(less, true); err != nil {
		t.Errorf("a missing tensor with missing set: %v", err)
	}
	more := func(all []Target) []Target {
		return append(all, Target{Name: "more", DType: tensor.U8, Shape: []int64{1}, At: all[0].At})
	}
	if err := run(more, false); err != nil {
		t.Errorf("a tensor that is not in the delta: %v", err)
	}
	twice := func(all []Target) []Target { return append(all, all[0]) }
	if err := run(twice, false); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("a name twice: %v", err)
	}
	over := func(all []Target) []Target { all[1].At = all[0].At + 8; return all }
	if err := run(over, false); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("overlapping memory: %v", err)
	}
}

// broken is a host applier that fails or corrupts memory.
type broken struct {
	*host
	steps  []step
	times  int // number of calls of apply that corrupt a byte
	refuse bool
}

func (b *broken) apply() error {
	if b.refuse {
		b.refuse = false
		return errs.New(errs.ErrDevice, "the device failed")
	}
	err := b.host.apply()
	if b.times > 0 {
		b.times--
		full := slices.IndexFunc(b.steps, func(s step) bool { return s.bytes > 0 })
		device.Bytes(b.steps[full].At, 1)[0] ^= 4
	}
	return err
}

// The parts of Apply together do the same as Whole. Check changes nothing, and detects tensors that differ from the
// base. Change does not check again. Undo restores the base.
func TestParts(t *testing.T) {
	now, base := trained(seeded(t))
	f := reparse(t, layOutFile(t, encode(t, now, base)))
	m := base.clone()
	m.data[len(m.data)-1] = m.data[0]
	defer runtime.KeepAlive(m)
	do := func(part Part) error {
		_, err := Apply(context.Background(), []*File{f}, m.targets(), false, 2, part)
		return err
	}
	for _, c := range []struct {
		part Part
		want *model
		err  error
	}{{Check, base, nil}, {Change, now, nil}, {Check, now, errs.ErrBase}, {Undo, base, nil}, {Check, base, nil},
		{"half", base, errs.ErrArgument}} {
		if err := do(c.part); !errors.Is(err, c.err) {
			t.Fatalf("%s: %v", c.part, err)
		}
		if !m.same(c.want) {
			t.Fatalf("%s: the tensors have wrong bytes", c.part)
		}
	}
}

// TestUndone checks that all tensors are restored if the result does not have the delta's digest. If that also fails,
// the error names the affected tensors and the file.
func TestUndone(t *testing.T) {
	now, base := trained(seeded(t))
	f := reparse(t, layOutFile(t, encode(t, now, base)))
	for times, want := range map[int]string{1: "load them again", 2: "have their old values"} {
		m := base.clone()
		m.data[len(m.data)-1] = m.data[0]
		defer runtime.KeepAlive(m)
		steps, err := planSteps([]*File{f}, m.targets(), false)
		if err != nil {
			t.Fatal(err)
		}
		h := &host{steps: steps, workers: 2}
		err = applyChange(context.Background(), Begin(), []applier{&broken{host: h, steps: steps, times: times}},
			[][]step{steps})
		if !errors.Is(err, errs.ErrCorrupt) || !strings.Contains(err.Error(), want) ||
			!strings.Contains(err.Error(), "delta "+f.URI) {
			t.Errorf("with %d corrupted bytes: %v", times, err)
		}
		if times == 2 && !m.same(base) {
			t.Error("the change was not undone")
		}
	}
	// If the second of two devices fails, the first is undone.
	m := base.clone()
	m.data[len(m.data)-1] = m.data[0]
	defer runtime.KeepAlive(m)
	steps, err := planSteps([]*File{f}, m.targets(), false)
	if err != nil {
		t.Fatal(err)
	}
	one, two := &host{steps: steps[:3], workers: 1}, &host{steps: steps[3:], workers: 1}
	err = applyChange(context.Background(), Begin(), []applier{one, &broken{host: two, steps: steps[3:], refuse: true}},
		[][]step{steps[:3], steps[3:]})
	if !errors.Is(err, errs.ErrDevice) {
		t.Errorf("a device that fails: %v", err)
	}
	for i := range steps[:3] {
		if s := &steps[i]; digest.Of(device.Bytes(s.At, s.bytes)) != s.first() {
			t.Errorf("%s was not undone: %v", s.Name, err)
		}
	}
}

// TestChain checks that a chain can be applied in one pass, or merged into the delta between its ends, and that a
// chain with a gap is refused.
func TestChain(t *testing.T) {
	r := seeded(t)
	models := []*model{mixed(r)}
	var chain []*File
	for range 5 {
		last := models[len(models)-1]
		next := last.clone()
		next.data[len(next.data)-1] = next.data[0]
		for first := true; first || next.same(last); first = false { // without a change, the chain would have no gap
			for i := range next.data[:len(next.data)-1] {
				if r.IntN(3) > 0 {
					next.step(r, i, r.Float64()*r.Float64()*0.1)
				}
			}
		}
		chain = append(chain, reparse(t, layOutFile(t, encode(t, next, models[len(models)-1]))))
		models = append(models, next)
	}
	got := models[0].clone()
	got.data[len(got.data)-1] = got.data[0]
	if err := applySteps(got, chain...); err != nil || !got.same(models[5]) {
		t.Fatalf("applying the chain: %v", err)
	}
	merged, err := Merge(context.Background(), chain, 2)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(layOutFile(t, merged), layOutFile(t, encode(t, models[5], models[0]))) {
		t.Error("the merged chain is not the delta between its ends")
	}
	got = models[0].clone()
	if err := applySteps(got, chain[0], chain[2]); !errors.Is(err, errs.ErrBase) || !got.same(models[0]) {
		t.Errorf("a chain with a gap: %v", err)
	}
	if _, err := Merge(context.Background(), []*File{chain[1], chain[0]}, 2); !errors.Is(err, errs.ErrBase) {
		t.Errorf("merged in the wrong order: %v", err)
	}
	// A step forward and back again merges into an empty delta.
	back := encode(t, models[0], models[1])
	none, err := Merge(context.Background(), []*File{chain[0], back}, 2)
	if err != nil || slices.ContainsFunc(none.Tensors, func(t Tensor) bool { return len(t.Chunks) > 0 }) {
		t.Errorf("forward and back again: %v", err)
	}
}

// TestManyDeltas checks that a long chain of small steps gives the correct bytes, and that its memory is freed.
func TestManyDeltas(t *testing.T) {
	r := seeded(t)
	m := &model{}
	m.add(r, "w", tensor.BF16, 2000)
	m.add(r, "v", tensor.F32, 300)
	got := m.clone()
	var before, after runtime.MemStats
	for i := range 10_000 {
		now := m.clone()
		now.step(r, i%2, 0.01)
		f := encode(t, now, m)
		if i%10 == 0 {
			f = reparse(t, layOutFile(t, f))
		}
		if err := applySteps(got, f); err != nil || !got.same(now) {
			t.Fatalf("applying delta %d: %v", i, err)
		}
		m = now
		if i == 100 {
			runtime.GC()
			runtime.ReadMemStats(&before)
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if after.HeapAlloc > before.HeapAlloc+4<<20 {
		t.Errorf("%d bytes were not freed", after.HeapAlloc-before.HeapAlloc)
	}
}

// TestChanged checks that a file with a changed byte or a truncated file is refused.
func TestChanged(t *testing.T) {
	r := seeded(t)
	base := &model{}
	base.add(r, "a", tensor.BF16, 300)
	base.add(r, "b", tensor.F32, 40)
	now := base.clone()
	now.step(r, 0, 0.1)
	b := layOutFile(t, encode(t, now, base))
	for range 3000 {
		c := bytes.Clone(b)
		c[r.IntN(len(c))] ^= 1 << r.IntN(8)
		if f, err := Parse(context.Background(), "d", c); err == nil {
			if got, _ := layOut(f, nil); !bytes.Equal(bytes.Join(got, nil), b) {
				t.Fatal("a changed byte was accepted")
			}
		} else if errs.Class(err) == "EngineError" {
			t.Fatalf("an error without a class: %v", err)
		}
	}
	for n := range len(b) {
		if _, err := Parse(context.Background(), "d", b[:n]); err == nil {
			t.Fatalf("%d bytes of %d were accepted", n, len(b))
		}
	}
}

// FuzzTable checks that a table with a correct checksum is refused, or is applied without leaving its tensors.
func FuzzTable(f *testing.F) {
	r := rand.New(rand.NewPCG(9, 2))
	base := &model{}
	base.add(r, "a", tensor.BF16, 3, 100)
	base.add(r, "b", tensor.F32, 40)
	base.add(r, "c", tensor.F32, 40)
	base.data[2] = base.data[1]
	now := base.clone()
	now.step(r, 0, 0.1)
	now.step(r, 1, 0.1)
	now.data[2] = now.data[1]
	defer runtime.KeepAlive([]*model{now, base})
	d, err := Encode(context.Background(), pairs(now, base), nil, 1, func(int64) {})
	if err != nil {
		f.Fatal(err)
	}
	table, err := encodeTable(d)
	if err != nil {
		f.Fatal(err)
	}
	var data []byte
	for i := range d.Tensors {
		if d.Tensors[i].Same < 0 {
			data = append(data, bytes.Join(d.Tensors[i].Chunks, nil)...)
		}
	}
	f.Add(table, data)
	f.Fuzz(func(t *testing.T, table, data []byte) {
		if len(table) < 128 || len(table)%64 != 0 || len(data) > 1<<16 {
			return
		}
		// Correct the checksum. Its offset depends on the table's header.
		end := headSize + 8*int(le.Uint32(table[16:])) + recordSize*int(le.Uint32(table[8:])) +
			entrySize*int(le.Uint32(table[12:])) + int(le.Uint32(table[20:]))
		if end+4 > len(table) {
			return
		}
		table = bytes.Clone(table)
		le.PutUint32(table[end:], sumOf(table[:end]))
		file := &File{URI: "fuzz"}
		p := parser{f: file, b: table, data: data}
		if err := p.table(); err != nil {
			if errs.Class(err) == "EngineError" {
				t.Fatalf("an error without a class: %v", err)
			}
			return
		}
		for n := range p.sums {
			x := &file.Tensors[p.of[n]]
			if c := x.Chunks[n-p.first[p.of[n]]]; len(c) > 0 {
				p.sums[n] = sumOf(c)
			}
		}
		if p.checkChunks(context.Background()) != nil {
			return
		}
		var steps []step
		for i := range file.Tensors {
			x := &file.Tensors[i]
			if x.Bytes > 1<<20 {
				return
			}
			b := make([]byte, x.Bytes)
			steps = append(steps, step{Target: &Target{Name: x.Name, At: address(b)}, bytes: x.Bytes,
				links: []link{{file, x}}})
			defer runtime.KeepAlive(b)
		}
		if err := (&host{steps: steps, workers: 1}).apply(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestNamesAreText checks that a table with names that are not UTF-8 is refused.
func TestNamesAreText(t *testing.T) {
	for name, want := range map[string]error{"w\u00e9": nil, "w\xff": errs.ErrFormat, "\xed\xa0\x80": errs.ErrFormat} {
		f := &File{ChunkLen: ChunkBytes, Tensors: []Tensor{{Name: name, DType: tensor.U8, Shape: []int64{0}, Same: -1}}}
		table, err := encodeTable(f)
		if err != nil {
			t.Fatal(err)
		}
		p := parser{f: &File{}, b: table}
		if err := p.table(); !errors.Is(err, want) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

// TestDiff checks that changed elements are counted for each tensor.
func TestDiff(t *testing.T) {
	r := seeded(t)
	base := &model{}
	base.add(r, "b", tensor.BF16, 200_000)
	base.add(r, "a", tensor.F32, 10)
	now := base.clone()
	for _, at := range []int{0, 2, 150_000, 399_998} {
		now.data[0][at] ^= 1
	}
	defer runtime.KeepAlive([]*model{now, base})
	rows, err := Diff(context.Background(), pairs(now, base), 2, func(int64) {})
	if err != nil || len(rows) != 2 {
		t.Fatal(err)
	}
	got := fmt.Sprint(rows[0].Name, rows[0].Changed, rows[0].Elements, rows[1].Name, rows[1].Changed, rows[1].Elements)
	if got != "a 0 10 b 4 200000" && got != "a0 10b4 200000" {
		t.Errorf("%s", got)
	}
}

func sumOf(b []byte) uint32 { return crc32c.Sum(b) }
