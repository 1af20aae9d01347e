// Package sodium encrypts and decrypts boxes (XSalsa20-Poly1305) with the system's libsodium, if it is
// installed. libsodium uses AVX2 and AVX-512, while golang.org/x/crypto uses SSE2. The library is found at run
// time and is not part of overwire.
package sodium

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stddef.h>

typedef unsigned char byte;
typedef unsigned long long size;
typedef int (*seal_fn)(byte *box, byte *mac, const byte *data, size bytes, const byte *nonce, const byte *key);
typedef int (*open_fn)(byte *data, const byte *box, const byte *mac, size bytes, const byte *nonce, const byte *key);

static seal_fn ow_seal;
static open_fn ow_open;

// ow_sodium_find returns the library's version, or NULL if it is not installed.
static const char *ow_sodium_find(void) {
	static const char *const names[] = {"libsodium.so.26", "libsodium.so.23", "libsodium.so"};
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		void *lib = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
		if (lib == NULL)
			continue;
		int (*init)(void) = (int (*)(void))dlsym(lib, "sodium_init");
		const char *(*version)(void) = (const char *(*)(void))dlsym(lib, "sodium_version_string");
		ow_seal = (seal_fn)dlsym(lib, "crypto_secretbox_detached");
		ow_open = (open_fn)dlsym(lib, "crypto_secretbox_open_detached");
		if (init != NULL && version != NULL && ow_seal != NULL && ow_open != NULL && init() >= 0)
			return version();
		dlclose(lib);
	}
	return NULL;
}

static int ow_sodium_seal(byte *p, byte *mac, size_t size, const byte *nonce, const byte *key) {
	return ow_seal(p, mac, p, size, nonce, key);
}

static int ow_sodium_open(byte *p, const byte *mac, size_t size, const byte *nonce, const byte *key) {
	return ow_open(p, p, mac, size, nonce, key);
}
*/
import "C"

import (
	"sync"
	"unsafe"
)

// Version returns the version of the system's libsodium, or "" if it is not installed. The first call loads the
// library for the lifetime of the process.
var Version = sync.OnceValue(func() string {
	if v := C.ow_sodium_find(); v != nil {
		return C.GoString(v)
	}
	return ""
})

// Seal encrypts p in place and returns the MAC. Version must not be "".
func Seal(p []byte, nonce *[24]byte, key *[32]byte) (mac [16]byte) {
	C.ow_sodium_seal(at(p), at(mac[:]), C.size_t(len(p)), at(nonce[:]), at(key[:])) // always returns 0
	return mac
}

// Open decrypts p in place if mac matches its bytes, and reports whether it does. Otherwise p is unchanged.
// Version must not be "".
func Open(p []byte, mac *[16]byte, nonce *[24]byte, key *[32]byte) bool {
	return C.ow_sodium_open(at(p), at(mac[:]), C.size_t(len(p)), at(nonce[:]), at(key[:])) == 0
}

func at(p []byte) *C.byte { return (*C.byte)(unsafe.Pointer(unsafe.SliceData(p))) }
