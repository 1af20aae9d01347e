package face

import (
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/nvcomp"
)

var batches = newTable[*cuda.Batch]("batch")

// GPUCount is how many GPUs there are: 0 where there is no driver.
func GPUCount() (int, error) {
	if cuda.Available() != nil {
		return 0, nil
	}
	info, err := cuda.Info()
	return len(info), err
}

// GPUNames lists the algorithms whose streams kernels decode, as JSON.
func GPUNames() (string, error) { return encode(nvcomp.GPUNames()) }

// GPUOf is the GPU that an address is of, or -1.
func GPUOf(address uint64) (int, error) { return cuda.DeviceOf(address), nil }

// GPUUsed tells of a stream that works on memory of the engine's; see
// cuda.Device.Used.
func GPUUsed(index int, stream uint64) error {
	d, err := cuda.Open(index)
	if err == nil {
		d.Used(uintptr(stream))
	}
	return err
}

// GPUMode exchanges the calling thread's mode of stream capture; see
// cuda.ThreadMode.
func GPUMode(mode int) int { return cuda.ThreadMode(mode) }

// GPUFollow lets a stream wait for what is queued on another.
func GPUFollow(index int, stream, after uint64) error {
	d, err := cuda.Open(index)
	if err != nil {
		return err
	}
	return d.Follow(uintptr(stream), uintptr(after))
}

// GPUStreamNew makes a stream.
func GPUStreamNew(index int) (uint64, error) {
	d, err := cuda.Open(index)
	if err != nil {
		return 0, err
	}
	s, err := d.NewStream()
	return uint64(s), err
}

// GPUStreamFree ends a stream.
func GPUStreamFree(index int, stream uint64) error {
	d, err := cuda.Open(index)
	if err != nil {
		return err
	}
	return d.FreeStream(uintptr(stream))
}

// GPUStreamSync waits for a stream.
func GPUStreamSync(index int, stream uint64) error {
	d, err := cuda.Open(index)
	if err != nil {
		return err
	}
	return d.SyncStream(uintptr(stream))
}

// GPUStreamCheck refuses a stream of another GPU.
func GPUStreamCheck(index int, stream uint64) error {
	d, err := cuda.Open(index)
	if err != nil {
		return err
	}
	return d.OwnsStream(uintptr(stream))
}

// GPUBatchFree forgets a batch, which goes on.
func GPUBatchFree(batch uint64) { batches.take(batch) }

// GPUDecode queues the decoding of streams, each given by five numbers: address,
// bytes, and of the content address, bytes and those of a chunk.
func GPUDecode(index int, on cuda.Order, kind int, algorithm string, packed []int64) (uint64, error) {
	streams, err := streamsOf(kind, packed)
	if err != nil {
		return 0, err
	}
	b, err := nvcomp.GPUDecode(index, on, algorithm, streams)
	if err != nil {
		return 0, err
	}
	return batches.put(b), nil
}

// GPUEncode queues the making of streams of X16, each given by six numbers: address
// and bytes of the content, of the room for the stream, bytes of a chunk, transform.
func GPUEncode(index int, on cuda.Order, kind int, packed []int64, scratch uint64, room int64) (uint64, error) {
	if kind < 0 || kind > int(nvcomp.WithSize) || len(packed)%6 != 0 {
		return 0, fault.New(fault.ErrArgument, "%d numbers of contents of kind %d", len(packed), kind)
	}
	streams := make([]cuda.Stream, len(packed)/6)
	for i := range streams {
		p := packed[6*i:]
		streams[i] = cuda.Stream{Src: uint64(p[0]), Size: p[1], Dst: uint64(p[2]), Stored: p[3], Chunk: p[4], Arg: uint32(p[5]), Kind: cuda.Kind(kind)}
	}
	b, err := nvcomp.GPUEncode(index, on, streams, scratch, room)
	if err != nil {
		return 0, err
	}
	return batches.put(b), nil
}

// GPUTransform is the transform of X16 for a dtype, or for a sample of n bytes of
// host memory at an address; -1 without one that is needed.
func GPUTransform(dtype string, sample uint64, n int64) (int, error) {
	if n < 0 || n > 0 && sample == 0 {
		return 0, fault.New(fault.ErrArgument, "a sample of %d bytes at %#x", n, sample)
	}
	return nvcomp.GPUTransform(dtype, memory(sample, n))
}

// GPUPeek asks streams what they are.
func GPUPeek(index int, on cuda.Order, kind int, algorithm string, packed []int64) ([]nvcomp.Glance, error) {
	streams, err := streamsOf(kind, packed)
	if err != nil {
		return nil, err
	}
	return nvcomp.GPUPeek(index, on, nvcomp.Kind(kind), algorithm, streams)
}

func streamsOf(kind int, packed []int64) ([]cuda.Stream, error) {
	if kind < 0 || kind > int(nvcomp.WithSize) || len(packed)%5 != 0 {
		return nil, fault.New(fault.ErrArgument, "%d numbers of streams of kind %d", len(packed), kind)
	}
	streams := make([]cuda.Stream, len(packed)/5)
	for i := range streams {
		p := packed[5*i:]
		streams[i] = cuda.Stream{Src: uint64(p[0]), Stored: p[1], Dst: uint64(p[2]), Size: p[3], Chunk: p[4], Kind: cuda.Kind(kind)}
	}
	return streams, nil
}

// GPUWait says what became of a batch, and forgets it: the text of each stream's
// error, and how long those became that were made. Without wait ok is false while
// it is under way.
func GPUWait(batch uint64, wait bool) (texts []string, sizes []int64, ok bool, err error) {
	b, err := batches.get(batch)
	if err != nil {
		return nil, nil, false, err
	}
	if !wait && !b.Done() {
		return nil, nil, false, nil
	}
	errs, err := b.Wait()
	batches.take(batch)
	if err != nil {
		return nil, nil, false, err
	}
	texts = make([]string, len(errs))
	for i, e := range errs {
		if e != nil {
			texts[i] = Text(&fault.At{Verb: "decode", Chunk: -1, Offset: -1, Err: e})
		}
	}
	return texts, b.Sizes(), true, nil
}

// GPUAlloc gives memory of a GPU.
func GPUAlloc(index int, n int64) (device.Memory, error) {
	d, err := cuda.Open(index)
	if err != nil {
		return device.Memory{}, err
	}
	mem, err := d.Alloc([]int64{n})
	if err != nil {
		return device.Memory{}, err
	}
	return mem[0], nil
}

// GPUCopy queues a copy between any two places.
func GPUCopy(index int, on cuda.Order, dst, src uint64, n int64, wait bool) error {
	d, err := cuda.Open(index)
	if err != nil {
		return err
	}
	return d.Copy(on, dst, src, n, wait)
}
