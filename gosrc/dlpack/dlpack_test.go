package dlpack

import (
	"reflect"
	"slices"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/tensor"
)

// Describe preserves the size of every dtype. With raw, it returns unsigned integers.
func TestDescribe(t *testing.T) {
	for d := tensor.Bool; d.Valid(); d++ {
		shape := []int64{3, 8}
		n := int64(24 * d.Bits() / 8)
		for _, raw := range []bool{false, true} {
			typ, dims := Describe(d, shape, n, raw)
			bits := int64(typ.Bits) * int64(typ.Lanes)
			for _, x := range dims {
				bits *= x
			}
			if bits != n*8 {
				t.Errorf("%v raw=%v: %v %v is %d bits, want %d", d, raw, typ, dims, bits, n*8)
			}
			if raw && (typ.Code != codeUInt || typ.Lanes != 1) {
				t.Errorf("%v raw: %v", d, typ)
			}
		}
	}
}

func TestDescribeSubByte(t *testing.T) {
	for _, c := range []struct {
		d     tensor.DType
		shape []int64
		n     int64
		raw   bool
		typ   Type
		dims  []int64
	}{
		{tensor.F4, []int64{3, 4}, 6, false, Type{codeF4E2M1FN, 4, 2}, []int64{3, 2}},
		{tensor.F4, []int64{3, 4}, 6, true, Type{codeUInt, 8, 1}, []int64{3, 2}},
		{tensor.F4, []int64{4, 3}, 6, false, Type{codeUInt, 8, 1}, []int64{6}}, // rows of 1.5 bytes
		{tensor.F4, []int64{3, 0}, 0, false, Type{codeF4E2M1FN, 4, 2}, []int64{3, 0}},
		{tensor.F6E2M3, []int64{4, 4}, 12, false, Type{codeUInt, 8, 1}, []int64{12}},
		{tensor.BF16, nil, 2, false, Type{codeBFloat, 16, 1}, nil},
		{tensor.C64, []int64{1}, 8, true, Type{codeUInt, 64, 1}, []int64{1}},
	} {
		typ, dims := Describe(c.d, c.shape, c.n, c.raw)
		if typ != c.typ || !slices.Equal(dims, c.dims) {
			t.Errorf("%v %v raw=%v: %v %v, want %v %v", c.d, c.shape, c.raw, typ, dims, c.typ, c.dims)
		}
	}
}

// mapped maps pages and places a Block with n holders at their end.
func mapped(t *testing.T, pages int, n int64, kind int64) (unsafe.Pointer, *device.Block) {
	t.Helper()
	size := uintptr(pages * 4096)
	p, err := unix.MmapPtr(-1, 0, nil, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	return p, device.NewBlock(unsafe.Add(p, size-64), n, p, uint64(size), kind)
}

// isMapped reports whether a page is mapped. It uses mincore, because qemu-user answers madvise without the kernel.
func isMapped(p unsafe.Pointer) bool {
	var resident byte
	_, _, err := unix.Syscall(unix.SYS_MINCORE, uintptr(p), 4096, uintptr(unsafe.Pointer(&resident)))
	return err == 0
}

// described reads a DLManagedTensor as a consumer does.
func described(m unsafe.Pointer) (d struct {
	data           unsafe.Pointer
	device         [2]int32
	typ            Type
	shape, strides []int64
}) {
	raw := (*struct {
		data           unsafe.Pointer
		device         [2]int32
		ndim           int32
		code, bits     uint8
		lanes          uint16
		shape, strides *int64
	})(m)
	d.data, d.device = raw.data, raw.device
	d.typ = Type{Code: raw.code, Bits: raw.bits, Lanes: raw.lanes}
	d.shape = append(d.shape, unsafe.Slice(raw.shape, raw.ndim)...)
	d.strides = append(d.strides, unsafe.Slice(raw.strides, raw.ndim)...)
	return d
}

// A batch describes many tensors in the same way as single calls, and each tensor releases only its own
// reference.
func TestBatch(t *testing.T) {
	const n = 5
	p, block := mapped(t, 2, n, device.KindMap)
	b := NewBatch(n)
	shapes := [][]int64{{2, 3}, {}, {0, 7}, {6}, {1, 2, 3}}
	for i, shape := range shapes {
		b.Add(device.Memory{Ptr: unsafe.Add(p, 64*i), Bytes: 6, Block: block, CUDA: int32(i % 2)}, Type{codeUInt, 8, 1},
			shape)
	}
	var made []unsafe.Pointer
	if err := b.Make(func(i int, m unsafe.Pointer) {
		if i != len(made) {
			t.Errorf("tensor %d was returned as number %d", i, len(made))
		}
		made = append(made, m)
	}); err != nil {
		t.Fatal(err)
	}
	for i, shape := range shapes {
		one := exported(t, device.Memory{Ptr: unsafe.Add(p, 64*i), Bytes: 6, CUDA: int32(i % 2)}, Type{codeUInt, 8, 1},
			shape)
		want, got := described(one), described(made[i])
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%v: %+v, want %+v", shape, got, want)
		}
		Delete(one)
	}
	for i, m := range made {
		if !isMapped(p) {
			t.Errorf("unmapped with %d holders left", n-i)
		}
		Delete(m)
	}
	if isMapped(p) {
		t.Error("memory is still mapped without a holder")
	}
	if err := NewBatch(0).Make(nil); err != nil {
		t.Error(err)
	}
}

// exported exports a tensor with a batch of one.
func exported(t *testing.T, mem device.Memory, typ Type, shape []int64) (m unsafe.Pointer) {
	t.Helper()
	b := NewBatch(1)
	b.Add(mem, typ, shape)
	if err := b.Make(func(_ int, managed unsafe.Pointer) { m = managed }); err != nil {
		t.Fatal(err)
	}
	return m
}

// Memory is freed when its last holder is released, in C or in Go.
func TestLastHolderUnmaps(t *testing.T) {
	for last := range 3 {
		base, block := mapped(t, 4, 3, device.KindMap)
		mem := func(i int) device.Memory {
			return device.Memory{Ptr: unsafe.Add(base, i*4096), Bytes: 4096, Block: block}
		}
		var drop [3]func()
		for i := range 2 {
			m := exported(t, mem(i), Type{codeUInt, 8, 1}, []int64{4096})
			drop[i] = func() { Delete(m) }
		}
		drop[2] = mem(2).Release
		for i := range 3 {
			if i != last {
				drop[i]()
			}
		}
		if !isMapped(base) {
			t.Fatalf("last=%d: unmapped while it had a holder", last)
		}
		drop[last]()
		if isMapped(base) {
			t.Errorf("last=%d: still mapped", last)
		}
	}
}

// A tensor in a shared region returns its whole pages when it is freed, and no pages of its neighbours.
func TestRegionGivesPagesBack(t *testing.T) {
	const pages = 64
	base, block := mapped(t, pages, 2, device.KindRegion)
	all := unsafe.Slice((*byte)(base), pages*4096-64)
	for i := range all {
		all[i] = 7
	}
	// The tensor is from the middle of page 1 to the middle of page 40, so pages 2 to 39 are whole.
	m := exported(t, device.Memory{Ptr: unsafe.Add(base, 4096+100), Bytes: 39 * 4096, Block: block},
		Type{codeUInt, 8, 1}, []int64{39 * 4096})
	Delete(m)
	for i, b := range all {
		want := byte(7)
		if i >= 2*4096 && i < 40*4096 {
			want = 0
		}
		if b != want {
			t.Fatalf("byte %d of page %d is %d, want %d", i%4096, i/4096, b, want)
		}
	}
	device.Memory{Ptr: base, Bytes: 4096, Block: block}.Release()
	if isMapped(base) {
		t.Error("still mapped")
	}
}

// Memory without a Block and tensors without elements can be exported and deleted.
func TestNothingToFree(t *testing.T) {
	for _, shape := range [][]int64{nil, {0}, {1 << 62, 0, 1 << 62}} {
		m := exported(t, device.Memory{}, Type{codeFloat, 32, 1}, shape)
		Delete(m)
	}
}

// When the last holder of an arena is released, in C or in Go, the arena goes to its list, or to the system if the list
// is full.
func TestArenas(t *testing.T) {
	const size = 4096
	p, err := unix.MmapPtr(-1, 0, nil, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	list := (*device.FreeList)(p)
	list.Room = 3 * size
	ways := []func(mem device.Memory){
		device.Memory.Release,
		func(mem device.Memory) { Delete(exported(t, mem, Type{codeUInt, 8, 1}, []int64{mem.Bytes})) },
	}
	var arenas []*device.Listed
	for i := range 6 {
		base, _ := mapped(t, 1, 1, device.KindArena)
		b := device.NewListed(unsafe.Add(base, size-64), 2, base, size, device.KindArena, p)
		mem := device.Memory{Ptr: base, Bytes: 100, Block: &b.Block}
		ways[i/3](mem)
		if !isMapped(base) || list.Room != int64(3-min(i, 3))*size {
			t.Fatalf("arena %d was freed while it had a holder", i)
		}
		ways[1-i%2](mem)
		if isMapped(base) != (i < 3) {
			t.Errorf("arena %d is mapped: %v", i, i >= 3)
		}
		arenas = append(arenas, b)
	}
	for i := range 3 {
		if b := list.TakeBlock(); b != arenas[2-i] || list.Room != int64(i+1)*size {
			t.Errorf("arena %d was taken, with space left for %d bytes", slices.Index(arenas, b), list.Room)
		}
	}
	if list.TakeBlock() != nil {
		t.Error("took an arena from an empty list")
	}
}
