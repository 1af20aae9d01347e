//go:build owfake

package sleep

import (
	"bufio"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/device/pinned"
	"github.com/overwire/overwire/gosrc/hoststore"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
)

// digestsOf returns the keyed digests of tensors on a GPU.
func digestsOf(t *testing.T, d *cuda.Device, in []Tensor) (texts []string) {
	t.Helper()
	var views []digest.View
	for _, x := range in {
		views = append(views, digest.Contiguous(uint64(uintptr(unsafe.Pointer(&x.Data[0]))), int64(len(x.Data))))
	}
	sums, err := d.Digest(stream.Order{}, views, digest.ProcessKey())
	if err != nil {
		t.Fatal(err)
	}
	for _, sum := range sums {
		texts = append(texts, sum.String())
	}
	return texts
}

// Tensors of a GPU that the host store has need no pinned memory, and wake from the store's memory after it has ended.
// Changed ones are compressed. The model loads both.
func TestSharedFake(t *testing.T) {
	smaller(t)
	defer ended(t, cuda.Fake(64<<20))()
	d, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(t.TempDir(), "s")
	t.Cleanup(func() { knob.Load(nil) })
	knob.Load(map[string]string{"OVERWIRE_HOST": socket})
	store, err := hoststore.Listen(hoststore.Options{Socket: socket, Budget: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	host := slices.DeleteFunc(several(random(t), 90_000), func(x Tensor) bool { return x.Name == "tied" || x.Name == "e" })
	in, free := onGPU(t, d, host)
	defer free()
	spec := Spec{Device: "cuda:0"}
	spec.Digests = digestsOf(t, d, in)
	for k := range 2 {
		j := job.New("sleep")
		rep, err := KeepOnHost(t.Context(), j, spec, in)
		if err != nil || rep.Tensors != len(in) || rep.Shared == 0 || rep.Stored != 0 || j.Bytes.Load() != rep.Bytes {
			t.Fatalf("%d: %+v, %d, %v", k, rep, j.Bytes.Load(), err)
		}
		if pinned.Ready(d) != 0 {
			t.Error("memory stays pinned")
		}
	}
	m, rep, err := Sleep(t.Context(), job.New("sleep"), spec, in)
	if err != nil || rep.Stored != 0 || rep.Shared == 0 || rep.Staging != 0 {
		t.Fatalf("%+v, %v", rep, err)
	}
	for i := range in[:2] {
		in[i].Data[0] ^= 1
	}
	spec.Digests = digestsOf(t, d, in)
	both, rep, err := Sleep(t.Context(), job.New("sleep"), spec, in)
	if err != nil || rep.Stored == 0 || rep.Shared == 0 || rep.Tensors != len(in) {
		t.Fatalf("%+v, %v", rep, err)
	}
	store.Close()
	same(t, both, "cuda:0", in)
	both.Close()
	for i := range in[:2] {
		in[i].Data[0] ^= 1
	}
	same(t, m, "cuda:0", in)
	m.Close()
}

// Two processes with the same tensors on a GPU share one entry, and need no memory of their own while the tensors
// sleep. If one process is killed, the other can still wake, even after the store has ended.
func TestTwoEnginesFake(t *testing.T) {
	const variable = "OVERWIRE_TEST_STORE"
	if socket := os.Getenv(variable); socket != "" {
		runEngine(t, socket)
		return
	}
	socket := filepath.Join(t.TempDir(), "s")
	store, err := hoststore.Listen(hoststore.Options{Socket: socket, Budget: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	client, err := hoststore.Dial(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	await := func(users int) (used int64) {
		t.Helper()
		for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			r, err := client.Budget(t.Context(), 0)
			if err == nil && r.Counts.Puts == 1 && len(r.Entries) == 1 && r.Entries[0].Users == users {
				return r.Used
			}
			if err != nil || time.Now().After(end) {
				t.Fatalf("%+v, %v, expected one entry with %d users", r, err, users)
			}
		}
	}
	var engines []*exec.Cmd
	var inputs []io.Closer
	var used int64
	for k := range 2 {
		engine := exec.Command(os.Args[0], "-test.run=^TestTwoEnginesFake$")
		engine.Env, engine.Stderr = append(os.Environ(), variable+"="+socket), os.Stderr
		in, err := engine.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := engine.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := engine.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = engine.Process.Kill(); _ = engine.Wait() })
		engines, inputs = append(engines, engine), append(inputs, in)
		if line, err := bufio.NewReader(out).ReadString('\n'); line != "asleep\n" {
			t.Fatalf("engine %d: %q, %v", k, line, err)
		}
		if now := await(k + 1); k > 0 && now != used {
			t.Errorf("the second engine needs %d bytes", now-used)
		} else {
			used = now
		}
	}
	if err := engines[0].Process.Kill(); err != nil {
		t.Fatal(err)
	}
	await(1)
	store.Close()
	_ = inputs[1].Close()
	if err := engines[1].Wait(); err != nil {
		t.Errorf("the second engine: %v", err)
	}
}

// runEngine lets tensors sleep until its input ends.
func runEngine(t *testing.T, socket string) {
	smaller(t)
	defer ended(t, cuda.Fake(64<<20))()
	knob.Load(map[string]string{"OVERWIRE_HOST": socket})
	d, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	host := slices.DeleteFunc(several(rand.New(rand.NewPCG(1, 2)), 90_000),
		func(x Tensor) bool { return x.Name == "tied" || x.Name == "e" })
	in, free := onGPU(t, d, host)
	defer free()
	spec := Spec{Device: "cuda:0", Digests: digestsOf(t, d, in)}
	if _, err := KeepOnHost(t.Context(), job.New("sleep"), spec, in); err != nil {
		t.Fatal(err)
	}
	m, rep, err := Sleep(t.Context(), job.New("sleep"), spec, in)
	if err != nil || rep.Stored != 0 || rep.Shared == 0 || pinned.Ready(d) != 0 {
		t.Fatalf("%+v, %v, %d bytes stay pinned", rep, err, pinned.Ready(d))
	}
	defer m.Close()
	fmt.Println("asleep")
	_, _ = io.ReadAll(os.Stdin)
	same(t, m, "cuda:0", in)
}
