package gds

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>

// From cufile.h. Its ABI has been stable since its first version.
struct status { int err, cu_err; }; // CUfileError_t
struct descr {                      // CUfileDescr_t
	int type; // 1 means a file descriptor
	union { int fd; void *handle; } handle;
	const void *ops;
};

static struct {
	struct status (*driver_open)(void);
	struct status (*handle_register)(void **, struct descr *);
	void (*handle_deregister)(void *);
	struct status (*buf_register)(const void *, size_t, int);
	struct status (*buf_deregister)(const void *);
	ssize_t (*read)(void *, void *, size_t, off_t, off_t);
} cufile;

static void *lib; // the library that ow_cufile opened last

// ow_cufile opens a library and gets its version. It returns 0 and *version (0 if the library is too old to report it),
// or -1 and the reason. The library stays loaded, because such libraries cannot be unloaded safely.
static int ow_cufile(const char *name, int *version, char *why, size_t n)
{
	*version = 0;
	lib = dlopen(name, RTLD_LAZY | RTLD_LOCAL);
	if (lib == NULL) {
		const char *e = dlerror();
		snprintf(why, n, "%s", e != NULL ? e : name);
		return -1;
	}
	if (dlsym(lib, "cuFileRead") == NULL || dlsym(lib, "cuFileDriverOpen") == NULL) {
		snprintf(why, n, "%s: cuFileRead or cuFileDriverOpen is missing", name);
		return -1;
	}
	struct status (*get)(int *) = (struct status (*)(int *))dlsym(lib, "cuFileGetVersion");
	if (get != NULL && get(version).err != 0)
		*version = 0;
	return 0;
}

// ow_cufile_begin looks up the functions of that library and opens the driver.
static int ow_cufile_begin(char *why, size_t n)
{
	struct { void **to; const char *symbol; } all[] = {
		{(void **)&cufile.driver_open, "cuFileDriverOpen"},
		{(void **)&cufile.handle_register, "cuFileHandleRegister"},
		{(void **)&cufile.handle_deregister, "cuFileHandleDeregister"},
		{(void **)&cufile.buf_register, "cuFileBufRegister"},
		{(void **)&cufile.buf_deregister, "cuFileBufDeregister"},
		{(void **)&cufile.read, "cuFileRead"},
	};
	for (size_t i = 0; i < sizeof all / sizeof *all; i++)
		if ((*all[i].to = dlsym(lib, all[i].symbol)) == NULL) {
			snprintf(why, n, "%s is missing", all[i].symbol);
			return -1;
		}
	struct status s = cufile.driver_open();
	if (s.err != 0) {
		snprintf(why, n, "cuFileDriverOpen failed: error %d, CUDA error %d", s.err, s.cu_err);
		return -1;
	}
	return 0;
}

static void *ow_cufile_open(int fd, struct status *s)
{
	struct descr d = {.type = 1, .handle.fd = fd};
	void *h = NULL;
	*s = cufile.handle_register(&h, &d);
	return s->err == 0 ? h : NULL;
}

static void ow_cufile_close(void *h) { cufile.handle_deregister(h); }

static struct status ow_cufile_register(void *p, size_t n) { return cufile.buf_register(p, n, 0); }

static void ow_cufile_unregister(void *p) { cufile.buf_deregister(p); }

static ssize_t ow_cufile_read(void *h, void *base, size_t n, off_t off, off_t at, int *system)
{
	errno = 0;
	ssize_t got = cufile.read(h, base, n, off, at);
	*system = errno;
	return got;
}
*/
import "C"

import (
	"errors"
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
)

// library loads a libcufile and returns its version (1130 for 1.13), or 0 if it does not report one.
func library(name string) (int, error) {
	why := make([]C.char, 512)
	c := C.CString(name)
	defer C.free(unsafe.Pointer(c))
	var version C.int
	if C.ow_cufile(c, &version, &why[0], C.size_t(len(why))) != 0 {
		return 0, errors.New(C.GoString(&why[0]))
	}
	return int(version), nil
}

// openDriver opens the driver of the library that was loaded last.
func openDriver() error {
	why := make([]C.char, 512)
	if C.ow_cufile_begin(&why[0], C.size_t(len(why))) != 0 {
		return errors.New(C.GoString(&why[0]))
	}
	return nil
}

// A File can be read directly into GPU memory.
type File struct {
	fd     int
	handle unsafe.Pointer // handle of libcufile
}

// Open prepares the file of fd. The caller still owns fd. The error is errs.ErrNotSupported if GPUDirect Storage is not
// available or does not support this file.
func Open(fd int) (*File, error) {
	if err := begin(); err != nil {
		return nil, err
	}
	own, err := reopen(fd)
	if err != nil {
		return nil, errs.New(errs.ErrNotSupported, "GPUDirect Storage: %v", err)
	}
	var s C.struct_status
	h := C.ow_cufile_open(C.int(own), &s)
	if h == nil {
		_ = unix.Close(own)
		return nil, errs.New(errs.ErrNotSupported,
			"GPUDirect Storage: cuFileHandleRegister failed: error %d, CUDA error %d", int(s.err), int(s.cu_err))
	}
	return &File{own, h}, nil
}

// reopen opens the same file again. It first tries O_DIRECT, which older libcufile versions require.
func reopen(fd int) (own int, err error) {
	for _, flag := range []int{unix.O_DIRECT, 0} {
		for {
			own, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDONLY|unix.O_CLOEXEC|flag, 0)
			if !errors.Is(err, unix.EINTR) {
				break
			}
		}
		if err == nil {
			return own, nil
		}
	}
	return -1, err
}

// ReadInto reads up to n bytes from offset off to base+at in GPU memory. Like pread
// it may read fewer, and it returns 0 at the end of the file.
func (f *File) ReadInto(base unsafe.Pointer, at, n, off int64) (int64, error) {
	var system C.int
	count := int64(C.ow_cufile_read(f.handle, base, C.size_t(n), C.off_t(off), C.off_t(at), &system))
	switch {
	case count >= 0:
		return count, nil
	case count == -1 && system != 0:
		return 0, errs.New(errs.ErrIO, "cuFileRead failed: %v", syscall.Errno(system))
	}
	return 0, errs.New(errs.ErrIO, "cuFileRead failed: error %d", -count)
}

// Close closes the file after the last read.
func (f *File) Close() {
	C.ow_cufile_close(f.handle)
	_ = unix.Close(f.fd)
}

// Register registers GPU memory with libcufile as a target of reads, which saves a copy. undo must be called before the
// memory is freed. If registering fails, reads still work and undo does nothing.
func Register(p unsafe.Pointer, n int64) (undo func()) {
	if begin() != nil || C.ow_cufile_register(p, C.size_t(n)).err != 0 {
		return func() {}
	}
	return func() { C.ow_cufile_unregister(p) }
}
