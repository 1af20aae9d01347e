package digest

// Describes contiguous and strided tensors in memory, and reads them in row-major order.

import (
	"unsafe"

	"github.com/overwire/overwire/gosrc/errs"
)

// A View is a tensor in host memory or, for GPU kernels, in the memory of that GPU. Strides are in bytes and may be
// negative or zero. Item is the element size in bytes: 1, 2, 4, 8 or 16.
type View struct {
	Address        uint64
	Item           int64
	Shape, Strides []int64
}

// Contiguous returns a view of contiguous bytes.
func Contiguous(address uint64, bytes int64) View {
	return View{Address: address, Item: 1, Shape: []int64{bytes}, Strides: []int64{1}}
}

// MaxRank is the maximum number of dimensions of a view.
const MaxRank = 64

// Bytes returns the size of the tensor's contiguous copy, or an error if the view is invalid.
func (v *View) Bytes() (int64, error) {
	if v.Item < 1 || v.Item > 16 || v.Item&(v.Item-1) != 0 || len(v.Shape) != len(v.Strides) || len(v.Shape) > MaxRank {
		return 0, errs.New(errs.ErrArgument, "invalid tensor: %d dimensions, %d strides and elements of %d bytes",
			len(v.Shape), len(v.Strides), v.Item)
	}
	n, zero := v.Item, false
	for _, d := range v.Shape {
		if d < 0 {
			return 0, errs.New(errs.ErrArgument, "invalid dimension %d: expected 0 or more", d)
		}
		zero = zero || d == 0
	}
	for _, d := range v.Shape {
		if zero {
			return 0, nil
		}
		if n > (1<<62)/d {
			return 0, errs.New(errs.ErrArgument, "the tensor of shape %v is too large", v.Shape)
		}
		n *= d
	}
	if v.Address == 0 {
		return 0, errs.New(errs.ErrArgument, "invalid address 0 for a tensor of %d bytes", n)
	}
	return n, nil
}

// Merged returns the same view with as few dimensions as possible, none of them of size 1. A contiguous tensor
// becomes one dimension of bytes. The view must not be empty.
func (v *View) Merged() View {
	m := View{Address: v.Address, Item: v.Item}
	for i, d := range v.Shape {
		s := v.Strides[i]
		if d == 1 {
			continue
		}
		if k := len(m.Shape) - 1; k >= 0 && m.Strides[k] == s*d {
			m.Shape[k] *= d
			m.Strides[k] = s
			continue
		}
		m.Shape, m.Strides = append(m.Shape, d), append(m.Strides, s)
	}
	if len(m.Shape) == 0 {
		m.Shape, m.Strides = []int64{1}, []int64{m.Item}
	}
	if len(m.Shape) == 1 && m.Strides[0] == m.Item {
		return Contiguous(m.Address, m.Shape[0]*m.Item)
	}
	return m
}

// IsContiguous reports whether a merged view is contiguous.
func (v *View) IsContiguous() bool { return len(v.Shape) == 1 && v.Strides[0] == 1 && v.Item == 1 }

// hostPointer converts a host address to a pointer. The memory must not be managed by Go's garbage collector, or must
// be kept alive.
func hostPointer(a uint64) unsafe.Pointer {
	p := uintptr(a)
	return *(*unsafe.Pointer)(unsafe.Pointer(&p))
}

// gathered is the size of the buffer for the elements of strided views.
const gathered = 32 << 10

// addBytes adds bytes [at, at+n) of a merged view to s. at must be a multiple of 16, or of tileBytes if there is a key,
// and so must n unless the bytes are the last ones.
func (v *View) addBytes(s *State, at, n int64, key *Key) {
	add := s.Add
	if key != nil {
		add = func(at int64, p []byte) { key.Add(s, at, p) }
	}
	if v.IsContiguous() {
		add(at, unsafe.Slice((*byte)(hostPointer(v.Address+uint64(at))), n))
		return
	}
	var buf [gathered]byte
	w := v.walkFrom(at / v.Item)
	for n > 0 {
		k := min(n, gathered)
		w.readElements(buf[:k])
		add(at, buf[:k])
		at, n = at+k, n-k
	}
}

// A walker is a position in a view.
type walker struct {
	v    *View
	at   uint64 // address of the element
	coor [MaxRank]int64
}

// walkFrom returns a walker at an element of the view.
func (v *View) walkFrom(element int64) *walker {
	w := &walker{v: v, at: v.Address}
	for i := len(v.Shape) - 1; i >= 0; i-- {
		w.coor[i] = element % v.Shape[i]
		element /= v.Shape[i]
		w.at += uint64(w.coor[i] * v.Strides[i])
	}
	return w
}

// readElements copies the next elements until p is full.
func (w *walker) readElements(p []byte) {
	v, last := w.v, len(w.v.Shape)-1
	item, stride := v.Item, v.Strides[last]
	for len(p) > 0 {
		run := min(v.Shape[last]-w.coor[last], int64(len(p))/item)
		bytes := run * item
		if stride == item {
			copy(p[:bytes], unsafe.Slice((*byte)(hostPointer(w.at)), bytes))
		} else {
			gatherElements(p[:bytes], w.at, stride, item)
		}
		p = p[bytes:]
		w.coor[last] += run
		w.at += uint64(run * stride)
		for i := last; i > 0 && w.coor[i] == v.Shape[i]; i-- {
			w.at += uint64(v.Strides[i-1] - v.Shape[i]*v.Strides[i])
			w.coor[i] = 0
			w.coor[i-1]++
		}
	}
}

// gatherElements copies elements that are stride bytes apart.
func gatherElements(p []byte, at uint64, stride, item int64) {
	switch item {
	case 1:
		gatherTyped[uint8](p, at, stride)
	case 2:
		gatherTyped[uint16](p, at, stride)
	case 4:
		gatherTyped[uint32](p, at, stride)
	case 8:
		gatherTyped[uint64](p, at, stride)
	default:
		gatherTyped[[2]uint64](p, at, stride)
	}
}

func gatherTyped[T any](p []byte, at uint64, stride int64) {
	out := unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(p))), len(p)/int(unsafe.Sizeof(*new(T))))
	for i := range out {
		out[i] = *(*T)(hostPointer(at))
		at += uint64(stride)
	}
}
