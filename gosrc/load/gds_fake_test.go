//go:build owfake

package load_test

import (
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/device/gds"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/load/loadtest"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/tensor"
)

// fakeCufile is the source of a libcufile that reads with pread into the fake driver's device memory. The first byte of
// the file MODE selects an error to simulate. The library writes its counters to the file COUNTS.
const fakeCufile = `
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

typedef struct { int err, cu_err; } status;
typedef struct { int type; union { int fd; void *handle; } handle; const void *ops; } descr;
static struct { int64_t drivers, handles, buffers, reads, bytes, wrong; } n;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *base;
static size_t length;

static char mode(void)
{
	char c = 0;
	int fd = open(MODE, O_RDONLY);
	if (read(fd, &c, 1) != 1)
		c = 0;
	close(fd);
	return c;
}
static void count(int64_t *what, int64_t by)
{
	pthread_mutex_lock(&lock);
	*what += by;
	int fd = open(COUNTS, O_WRONLY | O_CREAT, 0600);
	if (pwrite(fd, &n, sizeof n, 0) != sizeof n)
		abort();
	close(fd);
	pthread_mutex_unlock(&lock);
}
static status with(char refuses, int err) { return (status){mode() == refuses ? err : 0, 0}; }

status cuFileGetVersion(int *v) { *v = 1130; return (status){0, 0}; }
status cuFileDriverOpen(void) { count(&n.drivers, 1); return with('d', 5011); }
status cuFileHandleRegister(void **h, descr *d)
{
	if (d->type != 1)
		count(&n.wrong, 1);
	if (mode() == 'h')
		return (status){5027, 0};
	int *own = malloc(sizeof *own);
	*own = d->handle.fd;
	*h = own;
	count(&n.handles, 1);
	return (status){0, 0};
}
void cuFileHandleDeregister(void *h) { free(h); count(&n.handles, -1); }
status cuFileBufRegister(const void *p, size_t len, int flags)
{
	if (mode() == 'b')
		return (status){5016, 0};
	base = p;
	length = len;
	count(&n.buffers, 1);
	return (status){0, 0};
}
status cuFileBufDeregister(const void *p) { count(p == base ? &n.buffers : &n.wrong, p == base ? -1 : 1); base = NULL; return (status){0, 0}; }
ssize_t cuFileRead(void *h, void *p, size_t len, off_t off, off_t at)
{
	count(&n.reads, 1);
	if (base != NULL && (p != (void *)base || at < 0 || at + len > length))
		count(&n.wrong, 1);
	switch (mode()) {
	case 'e': errno = EIO; return -1;
	case 'x': return -5011;
	case 't': if (off > 100000) return 0; break;
	case 's': len = (len + 2) / 3; break; // short
	}
	// Through a buffer: a descriptor with O_DIRECT needs aligned memory.
	size_t head = off % 4096, want = (head + len + 4095) / 4096 * 4096;
	char *buf = aligned_alloc(4096, want);
	ssize_t got = pread(*(int *)h, buf, want, off - head);
	if (got > (ssize_t)head) {
		got = got - head < len ? got - head : len;
		memcpy((char *)p + at, buf + head, got);
	} else if (got >= 0)
		got = 0;
	free(buf);
	if (got > 0)
		count(&n.bytes, got);
	return got;
}
`

// saved writes tensors to a file and opens it.
func saved(t *testing.T, spec save.Spec, in []save.Input) *load.Model {
	t.Helper()
	spec.Path = filepath.Join(t.TempDir(), "model.safetensors")
	if _, err := save.Write(t.Context(), job.New("save"), spec, in); err != nil {
		t.Fatal(err)
	}
	return loadtest.OpenModel(t, spec.Path)
}

// cufile holds the fake library's counters.
type cufile struct{ Drivers, Handles, Buffers, Reads, Bytes, Wrong int64 }

// fakeGDS builds the fake library and uses it instead of the real one.
func fakeGDS(t *testing.T, mode string) (counts func() cufile) {
	t.Helper()
	dir := t.TempDir()
	put := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	file, module := put("mode", mode), put("version", "version: 2.25.7\n")
	library, result := filepath.Join(dir, "libcufile.so"), filepath.Join(dir, "counts")
	cmd := exec.Command("cc", "-shared", "-fPIC", "-w", "-DMODE=\""+file+"\"", "-DCOUNTS=\""+result+"\"", "-x", "c",
		"-o", library, "-")
	cmd.Stdin = strings.NewReader(fakeCufile)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(gds.Use(library, module))
	return func() (c cufile) {
		b, err := os.ReadFile(result)
		if err != nil {
			return c
		}
		if _, err := binary.Decode(b, binary.NativeEndian, &c); err != nil {
			t.Fatal(err)
		}
		return c
	}
}

// Plain tensors and slices of every kind load through libcufile, even with short reads, with and without registered
// staging memory, and to a coherent device. No handle or registration is left.
func TestGDS(t *testing.T) {
	for mode, device := range map[string]string{"": "cuda:0", "s": "cuda:1", "b": "cuda:0"} {
		t.Run("mode "+mode, func(t *testing.T) {
			loadtest.UseEngine(t)
			counts := fakeGDS(t, mode)
			_, m, want := loadtest.WriteModel(t, save.Spec{}, "hostile", 3<<20)
			rep, err := gdsLoad(t, m, load.Options{Device: device}, nil, loadtest.BytesOf(m, want))
			if err != nil {
				t.Fatal(err)
			}
			c := counts()
			if c.Drivers != 1 || c.Handles+c.Buffers+c.Wrong != 0 || c.Bytes != rep.GDS || rep.GDS < rep.Bytes ||
				rep.NoGDS != "" {
				t.Errorf("%+v, %d of %d bytes with GPUDirect Storage, %q", c, rep.GDS, rep.Bytes, rep.NoGDS)
			}
			if mode == "s" && c.Reads < 3*rep.Stages.Pieces {
				t.Errorf("%d reads of %d pieces are not short", c.Reads, rep.Stages.Pieces)
			}
		})
	}
	loadtest.UseEngine(t)
	counts := fakeGDS(t, "")
	in := inputs()
	m := saved(t, save.Spec{}, in)
	at := int64(-1)
	for i := range m.Index().Tensors {
		if m.Index().Tensors[i].Name == in[0].Name {
			at = int64(i)
		}
	}
	var part []byte
	for r := 17; r < 201; r++ {
		part = append(part, in[0].Data[r*1024+66:r*1024+800]...)
	}
	reqs := []load.Request{{Tensor: at, Lo0: 17, Hi0: 201, Lo1: 33, Hi1: 400},
		{Tensor: at, Lo0: 5, Hi0: 299, Hi1: plan.Whole}}
	if _, err := gdsLoad(t, m, load.Options{}, reqs, func(i int) []byte {
		return [][]byte{part, in[0].Data[5*1024 : 299*1024]}[i]
	}); err != nil {
		t.Fatal(err)
	}
	if c := counts(); c.Bytes == 0 || c.Handles+c.Buffers+c.Wrong != 0 {
		t.Errorf("%+v", c)
	}
}

// If GPUDirect Storage is not available, does not support the file, or the bytes have checksums, the load reads through
// the host and reports why.
func TestGDSFallsBack(t *testing.T) {
	for _, c := range []struct {
		mode, why string
		compress  bool
	}{{"d", "cuFileDriverOpen failed: error 5011", false}, {"h", "cuFileHandleRegister failed: error 5027", false},
		{"", "checksums", true}} {
		t.Run(c.why, func(t *testing.T) {
			loadtest.UseEngine(t)
			counts := fakeGDS(t, c.mode)
			_, m, want := loadtest.WriteModel(t, save.Spec{Compress: c.compress}, "hostile", 1<<20)
			for range 2 {
				rep, err := gdsLoad(t, m, load.Options{}, nil, loadtest.BytesOf(m, want))
				if err != nil {
					t.Fatal(err)
				}
				if rep.GDS != 0 || !strings.Contains(rep.NoGDS, c.why) {
					t.Errorf("%d bytes, %q", rep.GDS, rep.NoGDS)
				}
			}
			if n := counts(); n.Reads+n.Handles+n.Buffers != 0 || n.Drivers > 1 {
				t.Errorf("%+v", n)
			}
		})
	}
	loadtest.UseEngine(t)
	defer gds.Use("libnone.so", "none")()
	_, m, want := loadtest.WriteModel(t, save.Spec{}, "", 1<<20)
	rep, err := gdsLoad(t, m, load.Options{}, nil, loadtest.BytesOf(m, want))
	if err != nil || rep.GDS != 0 || !strings.Contains(rep.NoGDS, "neither libcufile nor") {
		t.Errorf("%v, %+v", err, rep)
	}
	if _, err := m.Start(nil, load.Options{Read: "gsd"}); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("an invalid read mode: %v", err)
	}
}

// A failed read gives an error with file, tensor and offset. No handle or registration is left.
func TestGDSFails(t *testing.T) {
	for _, c := range []struct {
		mode, why string
		class     error
	}{{"e", "input/output error", errs.ErrIO}, {"x", "error 5011", errs.ErrIO}, {"t", "truncated", errs.ErrCorrupt}} {
		t.Run(c.why, func(t *testing.T) {
			loadtest.UseEngine(t)
			counts := fakeGDS(t, c.mode)
			path, m, _ := loadtest.WriteModel(t, save.Spec{}, "", 3<<20)
			_, err := gdsLoad(t, m, load.Options{}, nil, nil)
			var at *errs.At
			if !errors.Is(err, c.class) || !errors.As(err, &at) || at.Source != path || at.Tensor == "" ||
				at.Offset < 0 || !strings.Contains(err.Error(), c.why) {
				t.Error(err)
			}
			if n := counts(); n.Handles+n.Buffers+n.Wrong != 0 || n.Reads == 0 {
				t.Errorf("%+v", n)
			}
		})
	}
}

// If any driver call fails, once or permanently, the load continues or ends with a typed error. No handle or
// registration is left.
func TestGDSLosesTheDevice(t *testing.T) {
	path, _, _ := loadtest.WriteModel(t, save.Spec{}, "", 1<<20)
	counts := fakeGDS(t, "")
	for _, c := range []struct {
		sticky bool
		device string
	}{{false, "cuda:0"}, {true, "cuda:0"}, {false, "cuda:1"}} {
		failed := 0
		for nth := int64(1); ; nth += 3 {
			end := cuda.Fake(512 << 20)
			m := loadtest.OpenModel(t, path)
			cudatest.FailCall(nth, 999, c.sticky)
			l, err := m.Start(nil, load.Options{Device: c.device, Read: "gds", Stream: 1})
			if err == nil {
				err = loadtest.Finish(t, l)
				l.Close()
			}
			m.Close()
			calls := cudatest.CountCalls()
			if left := end(); left != "" {
				t.Fatalf("call %d: %v; left: %s", nth, err, left)
			}
			if c := counts(); c.Handles+c.Buffers+c.Wrong != 0 {
				t.Fatalf("call %d: %v; %+v", nth, err, c)
			}
			var at *errs.At
			if err != nil {
				failed++
				if !errors.Is(err, errs.ErrDevice) || !errors.As(err, &at) || at.Source != path {
					t.Fatalf("call %d: %v", nth, err)
				}
			}
			if calls < nth {
				break
			}
		}
		if failed < 10 {
			t.Errorf("only %d loads failed", failed)
		}
	}
	loadtest.CheckQuiet(t)
}

// Elements are cast as they leave the staging memory, as in other loads.
func TestGDSCasts(t *testing.T) {
	loadtest.UseEngine(t)
	fakeGDS(t, "")
	in := []save.Input{
		{Name: "a", DType: tensor.BF16, Shape: []int64{3}, Data: []byte{0x80, 0x3f, 0, 0x40, 0, 0xc0}}, // 1, 2, -2
		{Name: "b", DType: tensor.U8, Shape: []int64{1}, Data: []byte{7}},
		{Name: "c", DType: tensor.F32, Shape: []int64{2}, Data: []byte{0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0}},
	}
	m := saved(t, save.Spec{}, in)
	wide := map[string][]byte{"a": {0, 0, 0x80, 0x3f, 0, 0, 0, 0x40, 0, 0, 0, 0xc0}, "b": {7}, "c": in[2].Data}
	narrow := map[string][]byte{"a": in[0].Data, "b": {7}, "c": {0x80, 0x3f, 0, 0xc0}}
	for to, want := range map[string]map[string][]byte{"F32": wide, "BF16": narrow} {
		rep, err := gdsLoad(t, m, load.Options{Cast: to}, nil, func(i int) []byte {
			return want[m.Index().Tensors[i].Name]
		})
		if err != nil || rep.GDS == 0 {
			t.Errorf("%s: %v, %d bytes", to, err, rep.GDS)
		}
	}
}
