//go:build cgo

package gds

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

struct status { int err, cu_err; }; // CUfileError_t

// ow_cufile opens a library and asks for its version: 0 and *version (0 if it
// is too old to say), or -1 and why. The library stays loaded: unloading is
// what such libraries are worst at.
static int ow_cufile(const char *name, int *version, char *why, size_t n)
{
	*version = 0;
	void *lib = dlopen(name, RTLD_LAZY | RTLD_LOCAL);
	if (lib == NULL) {
		const char *e = dlerror();
		snprintf(why, n, "%s", e != NULL ? e : name);
		return -1;
	}
	if (dlsym(lib, "cuFileRead") == NULL || dlsym(lib, "cuFileDriverOpen") == NULL) {
		snprintf(why, n, "%s: no cuFileRead in it", name);
		return -1;
	}
	struct status (*get)(int *) = (struct status (*)(int *))dlsym(lib, "cuFileGetVersion");
	if (get != NULL && get(version).err != 0)
		*version = 0;
	return 0;
}
*/
import "C"

import (
	"errors"
	"unsafe"
)

// library loads a libcufile and returns its version, 1130 for 1.13; 0 if it
// does not say.
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
