// Package device defines the memory of a device, decode tasks, and the queues that run them. It does not depend on
// files.
package device

import (
	"context"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Block is the shared ownership of one allocation, which the last holder frees. It is outside Go's heap because the
// last holder is often a Python tensor. The C deleter in gosrc/dlpack releases that tensor and depends on this layout.
type Block struct {
	refs   int64
	base   unsafe.Pointer
	length uint64
	kind   int64
}

// The kind of a Block defines how the last holder frees it.
const (
	KindMap    = 0 // the last holder calls munmap(base, length)
	KindRegion = 1 // like KindMap, but each holder returns its own whole pages when released
	KindCUDA   = 2 // a Listed that is put on its list and freed by the list's owner
	KindArena  = 3 // a Listed that is put on its FreeList for reuse, or treated like KindMap if the list is full
)

// Hold adds a holder. The caller must already be a holder.
func (b *Block) Hold() { atomic.AddInt64(&b.refs, 1) }

// Alone reports whether the caller is the only holder. The caller must be a holder.
func (b *Block) Alone() bool { return atomic.LoadInt64(&b.refs) == 1 }

// A Listed is a Block that the last holder puts on a list without a lock. It is for memory that must not be freed on
// an arbitrary thread at an arbitrary time (KindCUDA, with the header outside the memory), and for memory that is
// reused (KindArena, with the header inside the memory). The C deleter depends on this layout.
type Listed struct {
	Block
	next *Listed
	list **Listed // head of the list; for KindArena it is the first field of a FreeList
}

// NewListed writes a Listed of KindCUDA or KindArena with n holders at p. p is C memory of
// unsafe.Sizeof(Listed{}) bytes. list, which is the head or the FreeList, is also C memory.
func NewListed(p unsafe.Pointer, n int64, base unsafe.Pointer, length uint64, kind int64,
	list unsafe.Pointer) *Listed {
	b := (*Listed)(p)
	*b = Listed{Block: Block{refs: n, base: base, length: length, kind: kind}, list: (**Listed)(list)}
	return b
}

// A FreeList holds blocks of KindArena that have no holder. It is in C memory. The C deleter depends on this layout.
type FreeList struct {
	head *Listed // first: Listed.list points to it
	Room int64   // bytes that can still be added
}

// TakeBlock removes the block that was added last, or returns nil. Only one caller at a time may call it. Otherwise
// a block could be removed and added again between reading the head and removing it.
func (l *FreeList) TakeBlock() *Listed {
	head := (*unsafe.Pointer)(unsafe.Pointer(&l.head))
	for {
		b := (*Listed)(atomic.LoadPointer(head))
		if b == nil {
			return nil
		}
		if atomic.CompareAndSwapPointer(head, unsafe.Pointer(b), unsafe.Pointer(b.next)) {
			atomic.AddInt64(&l.Room, int64(b.length))
			return b
		}
	}
}

// keepBlock puts a block on its FreeList and reports whether the list had space for it.
func (b *Listed) keepBlock() bool {
	room := &(*FreeList)(unsafe.Pointer(b.list)).Room
	if atomic.AddInt64(room, -int64(b.length)) < 0 {
		atomic.AddInt64(room, int64(b.length))
		return false
	}
	b.push()
	return true
}

// Next returns the next block of a list.
func (b *Listed) Next() *Listed { return b.next }

// Base returns the memory that a Listed owns.
func (b *Listed) Base() (unsafe.Pointer, uint64) { return b.base, b.length }

func (b *Listed) push() {
	head := (*unsafe.Pointer)(unsafe.Pointer(b.list))
	for {
		old := atomic.LoadPointer(head)
		b.next = (*Listed)(old)
		if atomic.CompareAndSwapPointer(head, old, unsafe.Pointer(b)) {
			return
		}
	}
}

// NewBlock writes a Block with n holders at p, which is inside [base, base+length).
func NewBlock(p unsafe.Pointer, n int64, base unsafe.Pointer, length uint64, kind int64) *Block {
	b := (*Block)(p)
	*b = Block{refs: n, base: base, length: length, kind: kind}
	return b
}

// Memory is the bytes of a tensor and the Block that keeps them alive. The zero value
// is the memory of a tensor without bytes.
type Memory struct {
	Ptr   unsafe.Pointer
	Bytes int64
	Block *Block
	CUDA  int32 // 1 + the CUDA device that Ptr belongs to; 0 means host memory
}

// Pointer converts an address outside Go's heap, which the garbage collector ignores, to a pointer.
func Pointer(at uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&at)) }

// Bytes returns n bytes of host memory at an address.
func Bytes(at uint64, n int64) []byte {
	return unsafe.Slice((*byte)(Pointer(uintptr(at))), n)
}

// Slice returns host memory as bytes, which are valid until Release.
func (m Memory) Slice() []byte { return unsafe.Slice((*byte)(m.Ptr), m.Bytes) }

// Release removes a holder. The C deleter does the same for tensors exported to Python.
func (m Memory) Release() {
	b := m.Block
	if b == nil {
		return
	}
	if b.kind == KindRegion {
		ReturnPages(m.Ptr, m.Bytes)
	}
	if atomic.AddInt64(&b.refs, -1) == 0 {
		switch l := (*Listed)(unsafe.Pointer(b)); {
		case b.kind == KindCUDA:
			l.push()
			return
		case b.kind == KindArena && l.keepBlock():
			return
		}
		base, length := b.base, uintptr(b.length)
		_ = unix.MunmapPtr(base, length)
	}
}

// minReturn is the minimum size of a run of pages that is worth a system call.
const minReturn = 64 << 10

// ReturnPages returns the whole pages inside [p, p+n) to the system. Their contents are lost.
func ReturnPages(p unsafe.Pointer, n int64) {
	const page = 4096
	up := (page - int64(uintptr(p)&(page-1))) & (page - 1)
	whole := (n - up) &^ (page - 1)
	if whole < minReturn {
		return
	}
	_ = unix.Madvise(unsafe.Slice((*byte)(unsafe.Add(p, up)), whole), unix.MADV_DONTNEED)
}

// A View selects the wanted bytes of a chunk if only some are wanted, or if they are not contiguous. The chunk contains
// bytes [At, At+logical) of a matrix with rows of Row bytes, a column part of the tensor that begins at byte Col of its
// rows. Rows [Row0, Row1) and byte columns [Col0, Col1) of the tensor are wanted and are packed at the destination.
type View struct {
	At, Row, Col           int64
	Row0, Row1, Col0, Col1 int64
}

// within returns the range [lo, hi) of matrix bytes that are in a chunk of the given logical size and in the wanted
// rows, and the range [c0, c1) of wanted byte columns of the matrix.
func (v *View) within(logical int64) (lo, hi, c0, c1 int64) {
	return max(v.At, v.Row0*v.Row), min(v.At+logical, v.Row1*v.Row), max(v.Col0, v.Col) - v.Col,
		min(v.Col1, v.Col+v.Row) - v.Col
}

// Any reports whether a chunk of the given logical size contains wanted bytes.
func (v *View) Any(logical int64) bool {
	lo, hi, c0, c1 := v.within(logical)
	if lo >= hi || c0 >= c1 {
		return false
	}
	for r := lo / v.Row; r*v.Row < hi; r++ {
		if max(lo, r*v.Row+c0) < min(hi, r*v.Row+c1) {
			return true
		}
	}
	return false
}

// Runs calls fn for each run of wanted bytes in a chunk of the given logical size:
// n bytes at offset src of the chunk belong at offset dst of the destination.
func (v *View) Runs(logical int64, fn func(dst, src, n int64)) {
	lo, hi, c0, c1 := v.within(logical)
	if lo >= hi || c0 >= c1 {
		return
	}
	pitch := v.Col1 - v.Col0
	if c0 == 0 && c1 == v.Row && pitch == v.Row { // whole rows, one run
		fn(lo-v.Row0*v.Row, lo-v.At, hi-lo)
		return
	}
	for r := lo / v.Row; r*v.Row < hi; r++ {
		a, b := max(lo, r*v.Row+c0), min(hi, r*v.Row+c1)
		if a < b {
			fn((r-v.Row0)*pitch+a-r*v.Row+v.Col-v.Col0, a-v.At, b-a)
		}
	}
}

// A DecodeTask is one stored chunk in a staged piece, and the destination of its bytes.
type DecodeTask struct {
	Chunk tensor.Chunk
	Src   uint32 // offset in the piece
	// Summed means that the chunk's Sum is the checksum of its stored bytes. Bytes of plain files have no checksum.
	Summed bool
	Dst    unsafe.Pointer // destination of the first byte of the chunk, or of the View
	View   *View          // nil for the whole chunk, contiguous
	// Cast is the conversion of the chunk's elements to another dtype, if the device supports it. The zero value
	// converts nothing.
	Cast Cast
}

// A Cast names the element types of a chunk and of its destination.
type Cast struct{ From, To tensor.DType }

// Host and AnyGPU are the results of Number for the host and for the current GPU.
const (
	Host   = -2
	AnyGPU = -1
)

// Number parses a device name as torch writes it: "cpu", "cuda", "cuda:1".
func Number(name string) (int64, error) {
	kind, number, hasNumber := strings.Cut(name, ":")
	n, err := strconv.ParseUint(number, 10, 16)
	switch {
	case kind == "" || hasNumber && err != nil:
		return 0, errs.New(errs.ErrArgument,
			"device %q: expected \"cpu\", \"cuda\", \"cuda:1\", a torch.device or an int", name)
	case kind == "cpu":
		return Host, nil
	case kind == "gpu":
		return 0, errs.New(errs.ErrNotSupported, "device %q: write \"cuda%s\", as in torch, or \"cpu\"",
			name, name[len(kind):])
	case kind != "cuda":
		return 0, errs.New(errs.ErrNotSupported, "device %q: only \"cpu\" and \"cuda\" are supported", name)
	case !hasNumber:
		return AnyGPU, nil
	}
	return int64(n), nil
}

// A Slot is the staging memory of one piece. The caller that got it from a Queue owns it until it calls Submit or Put.
type Slot interface {
	// Memory returns the slot's bytes, which are in pinned memory if the device needs that.
	Memory() []byte
	// View replaces the slot's own bytes with b until the slot is returned. b must not be longer than the slot and must
	// not change until then. If the device needs registered memory, b must be registered.
	View(b []byte)
	// ViewMirror returns the device memory to which Submit copies the slot's bytes, or nil if there is none. A caller
	// of ViewMirror writes the bytes there before Submit. Submit then copies nothing and only accepts raw chunks.
	ViewMirror() unsafe.Pointer
	// CheckOnSubmit makes Submit compare the checksums of tasks that have one, if the queue supports it (CanCheck).
	CheckOnSubmit()
}

// A Reader reads bytes of a source directly into device memory.
type Reader interface {
	// ReadInto reads n bytes from offset off to dst, which is in a slot's mirror (ViewMirror). It reads all of them or
	// returns an error, like source.Source.
	ReadInto(ctx context.Context, dst unsafe.Pointer, n, off int64) error
}

// A TraceFunc is called with what a device did ("copy" or "decode"), the stream, the times, and the number of bytes.
type TraceFunc = func(verb string, stream int, begin, end time.Time, bytes int64)

// A Queue orders the work of one device for one load. It has a fixed set of slots, each with one owner at a time. It
// accepts staged pieces and decodes their chunks to the destinations. It is safe for concurrent use.
type Queue interface {
	// Get waits for a free slot, or until ctx ends.
	Get(ctx context.Context) (Slot, error)
	// GetFor is like Get for one of several readers, numbered from 0. Each reader fills separate slots. It prefers a
	// slot that the same reader has filled before, which is near the reader's core.
	GetFor(ctx context.Context, reader int) (Slot, error)
	// Put returns a slot that was not submitted. It panics if a slot is returned twice.
	Put(s Slot)
	// Submit decodes the tasks to their destinations and takes the slot back. Src of each task is in the first n bytes
	// of the slot. done is called once per task when its bytes have been written or its error is known, possibly later
	// and on another goroutine. done must not wait for the queue. If Submit itself returns an error, done is not
	// called.
	Submit(s Slot, n int64, tasks []DecodeTask, done func(task int, err error)) error
	// Drain waits until every done call has returned or ctx ends. If the device is broken, it returns the error that
	// broke it.
	Drain(ctx context.Context) error
	// CanCheck reports whether Submit compares checksums after a slot's CheckOnSubmit. A wrong checksum gives an error
	// with errs.RuleChecksum, and the tensor may then contain wrong bytes. If CanCheck is false, the caller must
	// compare checksums before Submit.
	CanCheck() bool
	// Asynchronous reports whether Submit returns before its tasks are done. The device then measures times separately.
	Asynchronous() bool
	// TraceTimes makes an asynchronous queue report what it did with each piece after the piece has been decoded. nil
	// stops that. No piece may be in flight.
	TraceTimes(trace TraceFunc) error
	// PinnedBytes returns the size of all slots in host memory, in bytes.
	PinnedBytes() int64
	// Close waits until every slot has been returned and all work has ended, and frees the queue.
	Close()
}
