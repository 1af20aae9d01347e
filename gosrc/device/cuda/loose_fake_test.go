//go:build owfake

package cuda

import (
	"bytes"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A looseCase is the raw tasks of a piece: the bytes before each task in the slot, and at its destination.
type looseCase struct {
	name  string
	gaps  [][2]int
	short bool // needs few copies and no kernel
}

var looseCases = []looseCase{
	{"neighbours", [][2]int{{0, 0}, {0, 0}, {0, 0}, {0, 0}}, true},
	{"small gaps", [][2]int{{0, 0}, {15, 15}, {1, 1}, {8, 8}, {0, 0}}, true},
	{"a gap of GapLimit bytes", [][2]int{{0, 0}, {16, 16}, {0, 0}, {0, 0}}, true},
	{"different gaps", [][2]int{{3, 0}, {4, 8}, {0, 0}, {0, 0}}, true},
	{"FewRuns runs", slices.Repeat([][2]int{{0, 100}}, queue.FewRuns), true},
	{"FewRuns + 1 runs", slices.Repeat([][2]int{{0, 100}}, queue.FewRuns+1), false},
}

// A loose piece is loaded like any other piece. It writes only the bytes of its tasks, and gaps of fewer than 16 bytes
// between neighbouring tasks. It needs one copy per run and no kernel, unless there are many runs.
func TestLoose(t *testing.T) {
	r := random(t)
	for _, c := range looseCases {
		d, q, end := faked(t, 2, 1<<20)
		var bytesOf, want []byte
		var tasks []device.DecodeTask
		var at []int
		for _, gap := range c.gaps {
			b := weights(r, x16.Bytes, 1000+r.IntN(20_000))
			bytesOf = append(append(bytesOf, make([]byte, gap[0])...), b...)
			want = append(want, bytes.Repeat([]byte{0xee}, gap[1])...)
			at = append(at, len(want))
			want = append(want, b...)
			tasks = append(tasks, device.DecodeTask{Chunk: tensor.Chunk{Codec: tensor.CodecRaw, Stored: uint32(len(b)),
				Logical: uint32(len(b))}, Src: uint32(len(bytesOf) - len(b))})
		}
		mem, err := d.Alloc([]int64{int64(len(want))})
		if err != nil {
			t.Fatal(err)
		}
		fill := piece{bytes: bytes.Repeat([]byte{0xee}, len(want))}
		fill.raw(bytes.Repeat([]byte{0xee}, len(want)))
		fill.jobs[0].Src, fill.jobs[0].Dst, fill.bytes = 0, mem[0].Ptr, fill.bytes[:len(want)]
		put := func(b []byte, jobs []device.DecodeTask, loose bool) []string {
			s, err := q.Get(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			copy(s.Memory(), b)
			if loose {
				s.(*queue.Slot).AllowGapWrites()
			}
			cudatest.TakeHistory()
			if err := q.Submit(s, int64(len(b)), jobs, func(i int, err error) {
				if err != nil {
					t.Errorf("%s: task %d: %v", c.name, i, err)
				}
			}); err != nil {
				t.Fatal(err)
			}
			if err := q.Drain(t.Context()); err != nil {
				t.Fatal(err)
			}
			return cudatest.TakeHistory()
		}
		put(fill.bytes, fill.jobs, false)
		for i := range tasks {
			tasks[i].Dst = unsafe.Add(mem[0].Ptr, at[i])
		}
		calls := put(bytesOf, tasks, true)
		if got := !slices.Contains(calls, "launch"); got != c.short {
			t.Errorf("%s: %v", c.name, calls)
		}
		got := make([]byte, len(want))
		if err := d.Read(got, mem[0]); err != nil {
			t.Fatal(err)
		}
		for i, gap := range c.gaps { // gaps may be overwritten
			if i > 0 && gap[0] == gap[1] && gap[0] < 16 {
				copy(got[at[i]-gap[1]:at[i]], want[at[i]-gap[1]:])
			}
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s: wrong bytes", c.name)
		}
		mem[0].Release()
		if left := end(); left != "" {
			t.Errorf("%s: leaked: %s", c.name, left)
		}
	}
}

// A slot waits for its event before it writes, even without a kernel, and makes no other calls.
func TestFollowEvent(t *testing.T) {
	d, q, end := faked(t, 4, 1<<20)
	mem, err := d.Alloc([]int64{4096})
	if err != nil {
		t.Fatal(err)
	}
	after := endOf(q)
	q.UsePolling()
	for n, loose := range []bool{true, false, true} {
		s, err := q.Get(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		own := s.(*queue.Slot)
		own.FollowEvent(after)
		if loose {
			own.AllowGapWrites()
		}
		var tasks []device.DecodeTask
		for i := range 4 { // more than fewRaw, so a kernel is needed without AllowGapWrites
			c := tensor.Chunk{Codec: tensor.CodecRaw, Stored: 1024, Logical: 1024}
			tasks = append(tasks, device.DecodeTask{Chunk: c, Src: uint32(1024 * i),
				Dst: unsafe.Add(mem[0].Ptr, 1024*i)})
			copy(s.Memory()[1024*i:], bytes.Repeat([]byte{byte(n + 1)}, 1024))
		}
		cudatest.TakeHistory()
		if err := q.Submit(s, 4096, tasks, func(int, error) {}); err != nil {
			t.Fatal(err)
		}
		for deadline := time.Now().Add(time.Minute); !q.FinishEnded(); {
			if time.Now().After(deadline) {
				t.Fatal("the slot's work did not end")
			}
		}
		if err := q.Drain(t.Context()); err != nil {
			t.Fatal(err)
		}
		calls := cudatest.TakeHistory()
		waits, writes := slices.Index(calls, "stream_wait"), slices.Index(calls, "copy_in")
		if !loose {
			writes = slices.Index(calls, "launch")
		}
		if waits < 0 || writes < waits {
			t.Errorf("submission %d does not wait before it writes: %v", n, calls)
		}
		if !slices.Contains(calls, "event_query") {
			t.Errorf("submission %d: the queue did not query its event: %v", n, calls)
		}
		count := map[string]int{}
		for _, call := range calls {
			count[call]++
		}
		// With a kernel, the kernel's stream waits for the copies and for the event.
		if kernel := count["launch"]; count["event_record"] != 1+kernel || count["stream_wait"] != 1+kernel {
			t.Errorf("submit %d: %v", n, calls)
		}
		got := make([]byte, 4096)
		if err := d.Read(got, mem[0]); err != nil || !bytes.Equal(got, bytes.Repeat([]byte{byte(n + 1)}, 4096)) {
			t.Errorf("submit %d: %v, or wrong bytes", n, err)
		}
	}
	mem[0].Release()
	if left := end(); left != "" {
		t.Error(left)
	}
}

// Work on a view of device memory waits only for the streams that DelayKernels has named.
func TestFollowStreams(t *testing.T) {
	d, q, end := faked(t, 2, 1<<20)
	mem, err := d.Alloc([]int64{4096, 4096})
	if err != nil {
		t.Fatal(err)
	}
	want := bytes.Repeat([]byte{7}, 4096)
	for n := range 3 {
		streams := make([]uintptr, n)
		for i := range streams {
			if streams[i], err = d.NewStream(); err != nil {
				t.Fatal(err)
			}
		}
		from, to := uint64(uintptr(unsafe.Pointer(&want[0]))), uint64(uintptr(mem[0].Ptr))
		if err := d.Copy(stream.Order{}, to, from, 4096, true); err != nil {
			t.Fatal(err)
		}
		s, err := q.Get(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		s.(*queue.Slot).ViewDevice(uintptr(mem[0].Ptr), 4096)
		s.(*queue.Slot).DelayKernels(streams...)
		chunk := tensor.Chunk{Codec: tensor.CodecRaw, Stored: 4096, Logical: 4096}
		tasks := []device.DecodeTask{{Chunk: chunk, Dst: mem[1].Ptr}}
		cudatest.TakeHistory()
		if err := q.Submit(s, 4096, tasks, func(int, error) {}); err != nil {
			t.Fatal(err)
		}
		if err := q.Drain(t.Context()); err != nil {
			t.Fatal(err)
		}
		count := map[string]int{}
		for _, call := range cudatest.TakeHistory() {
			count[call]++
		}
		if count["launch"] != 1 || count["copy_in"] != 0 || count["stream_wait"] != n || count["event_record"] != 1+n {
			t.Errorf("after %d streams: %v", n, count)
		}
		got := make([]byte, 4096)
		if err := d.Read(got, mem[1]); err != nil || !bytes.Equal(got, want) {
			t.Errorf("after %d streams: %v, or wrong bytes", n, err)
		}
		for _, s := range streams {
			d.SyncAndFreeStream(s)
		}
	}
	mem[0].Release()
	mem[1].Release()
	if left := end(); left != "" {
		t.Error(left)
	}
}

// In a polled queue, a slot whose kernels wait for another stream does not delay slots on other streams. Close waits
// for it.
func TestPolledQueueFinishesWhatHasEnded(t *testing.T) {
	ended := Fake(64 << 20)
	d, err := Open(0)
	if err != nil {
		t.Fatal(err)
	}
	q, err := d.Queue(4, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	mem, err := d.Alloc([]int64{4096})
	if err != nil {
		t.Fatal(err)
	}
	stream, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	defer cudatest.OccupyStream(stream)()
	q.UsePolling()
	var landed []int
	for n := range 2 {
		s := q.TryGet()
		if s == nil {
			t.Fatal("expected a free slot")
		}
		if n == 0 {
			s.DelayKernels(stream)
		}
		s.ViewDevice(uintptr(mem[0].Ptr), 4096)
		task := device.DecodeTask{Dst: mem[0].Ptr, Chunk: tensor.Chunk{Codec: tensor.CodecRaw, Stored: 16, Logical: 16}}
		tasks := []device.DecodeTask{task, task, task, task}
		if err := q.Submit(s, 4096, tasks, func(task int, err error) {
			if err != nil {
				t.Error(err)
			}
			if task == 0 {
				landed = append(landed, n)
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	for deadline := time.Now().Add(time.Minute); !q.FinishEnded(); {
		if time.Now().After(deadline) {
			t.Fatal("no slot has ended")
		}
	}
	if !slices.Equal(landed, []int{1}) {
		t.Errorf("%v has landed, want only the second", landed)
	}
	q.Close()
	if !slices.Equal(landed, []int{1, 0}) {
		t.Errorf("%v has landed, but Close has returned", landed)
	}
	d.SyncAndFreeStream(stream)
	mem[0].Release()
	if left := ended(); left != "" {
		t.Errorf("leaked: %s", left)
	}
}
