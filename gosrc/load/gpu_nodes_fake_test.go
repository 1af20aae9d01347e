//go:build owfake

package load_test

// This file tests loads on a host that seems to have several NUMA nodes.

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/load/loadtest"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/source"
)

// twoNodes writes the NUMA files of a host where cores alternate between nodes 0 and 1, and cuda:N is local to node N.
func twoNodes(t *testing.T, had *unix.CPUSet) (root string, near [2]unix.CPUSet) {
	t.Helper()
	root = t.TempDir()
	put := func(name, text string) {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	lists, n := [2]string{"1022", "1023"}, 0
	for c := range 1022 {
		if had.IsSet(c) {
			lists[n%2] += fmt.Sprintf(",%d", c)
			near[n%2].Set(c)
			n++
		}
	}
	put("devices/system/node/online", "0-1")
	for i, list := range lists {
		put(fmt.Sprintf("devices/system/node/node%d/cpulist", i), list)
		dir := fmt.Sprintf("bus/pci/devices/ffff:%02d:00.0/", i)
		put(dir+"vendor", "0x10de")
		put(dir+"class", "0x030200")
		put(dir+"numa_node", fmt.Sprint(i))
	}
	return root, near
}

// A watched source records the cores that its reading threads may use.
type watched struct {
	source.Source
	mu   sync.Mutex
	seen []unix.CPUSet
}

func (w *watched) Facts() source.Facts {
	f := w.Source.Facts()
	f.File = nil // so ReadAt reads it
	return f
}

func (w *watched) ReadAt(ctx context.Context, p []byte, off int64) error {
	var set unix.CPUSet
	err := unix.SchedGetaffinity(0, &set)
	w.mu.Lock()
	if !slices.Contains(w.seen, set) {
		w.seen = append(w.seen, set)
	}
	w.mu.Unlock()
	if err != nil {
		return err
	}
	return w.Source.ReadAt(ctx, p, off)
}

// policy returns the kernel's NUMA policy for the memory of b: 0 means default, 1 means preferred nodes.
func policy(t *testing.T, b []byte) (kind int32, nodes uint64) {
	t.Helper()
	var mask [16]uint64
	if _, _, no := unix.Syscall6(unix.SYS_GET_MEMPOLICY, uintptr(unsafe.Pointer(&kind)), uintptr(unsafe.Pointer(&mask)),
		1025, uintptr(unsafe.Pointer(&b[0])), 2, 0); no != 0 {
		t.Skipf("this container does not report memory policies: %v", no)
	}
	return kind, mask[0]
}

// On a host with several nodes, readers run on the cores local to the GPU, and slots are in memory local to it. Loads
// are also correct if the kernel refuses this placement. With one node or unknown nodes, nothing is placed.
func TestNodes(t *testing.T) {
	path, _, want := loadtest.WriteModel(t, save.Spec{Compress: true, ChunkBytes: 64 << 10}, "", 4<<20)
	var had unix.CPUSet
	if err := unix.SchedGetaffinity(0, &had); err != nil {
		t.Fatal(err)
	}
	if had.Count() < 2 {
		t.Skip("this process has one core")
	}
	two, near := twoNodes(t, &had)
	for _, c := range []struct {
		root string
		gpu  int
		runs unix.CPUSet
		kind int32
	}{{two, 0, near[0], 1}, {two, 1, near[1], 0}, {t.TempDir(), 0, had, 0}} {
		restore, end := driver.UseSystemRoot(c.root), cuda.Fake(512<<20)
		d, err := cuda.Open(c.gpu)
		if err != nil {
			t.Fatal(err)
		}
		m := loadtest.OpenModel(t, path)
		w := &watched{Source: m.Sources()[0]}
		l, err := load.Of(m.Index(), []source.Source{w}, nil).Start(nil, load.Options{Device: fmt.Sprintf("cuda:%d", c.gpu)})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.Job().Wait(-1); err != nil {
			t.Fatal(err)
		}
		for i, x := range m.Index().Tensors {
			mem, _, _, _ := l.Take(i)
			got := make([]byte, mem.Bytes)
			if err := d.Read(got, mem); err != nil || !bytes.Equal(got, want[x.Name].Data) {
				t.Errorf("%+v: %q differs: %v", c, x.Name, err)
			}
			mem.Release()
		}
		l.Close()
		if !slices.Equal(w.seen, []unix.CPUSet{c.runs}) {
			t.Errorf("%+v: readers ran on %v", c, w.seen)
		}
		q, err := d.Queue(0, 0)
		if err != nil {
			t.Fatal(err)
		}
		s, err := q.Get(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		kind, on := policy(t, s.Memory())
		q.Put(s)
		q.Close()
		refused := d.NearNode().Refused()
		if c.kind != kind && refused == "" || kind == 1 && on != 1<<c.gpu {
			t.Errorf("%+v: slots have policy %d, nodes %b; refused: %q", c, kind, on, refused)
		}
		if left := end(); left != "" {
			t.Errorf("left behind: %s", left)
		}
		restore()
	}
	var now unix.CPUSet
	if err := unix.SchedGetaffinity(0, &now); err != nil || now != had {
		t.Errorf("afterwards a thread runs on %v: %v", now, err)
	}
}
