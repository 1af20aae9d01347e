package dlpack

import (
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A tensor on a GPU is described as such. The deleter of the last holder puts the block on its list, as
// Memory.Release does.
func TestCUDA(t *testing.T) {
	page, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(page) }()
	list := unsafe.Pointer(&page[0])
	base := unsafe.Pointer(&page[1024]) // stands for device memory
	var want []*device.Listed
	for i := range 2 {
		b := device.NewListed(unsafe.Pointer(&page[128*(i+1)]), 2, base, 512, device.KindCUDA, list)
		mem := device.Memory{Ptr: base, Bytes: 512, Block: &b.Block, CUDA: 4}
		typ, dims := Describe(tensor.BF16, []int64{256}, 512, false)
		m := exported(t, mem, typ, dims)
		where := *(*[2]int32)(unsafe.Add(m, unsafe.Sizeof(uintptr(0)))) // DLTensor.device
		if where != [2]int32{2, 3} {
			t.Errorf("device %v, want kDLCUDA 3", where)
		}
		Delete(m)
		if taken := *(**device.Listed)(list); i == 0 && taken != nil {
			t.Error("the block was listed while it had a holder")
		}
		mem.Release()
		want = append(want, b)
	}
	first := *(**device.Listed)(list)
	if first != want[1] || first.Next() != want[0] || want[0].Next() != nil {
		t.Error("the list does not contain the released blocks, the last one first")
	}
	// Go releases first, and then the deleter lists the block.
	b := device.NewListed(unsafe.Pointer(&page[512]), 2, base, 512, device.KindCUDA, list)
	mem := device.Memory{Ptr: base, Bytes: 512, Block: &b.Block, CUDA: 1}
	mem.Release()
	m := exported(t, mem, Type{codeUInt, 8, 1}, []int64{512})
	Delete(m)
	if first := *(**device.Listed)(list); first != b || first.Next() != want[1] {
		t.Error("the deleter did not list the block")
	}
}
