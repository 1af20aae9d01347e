// Package twins is the kernels compiled for the host, for the fake driver of device/cuda.
// C calls them there; Go has nothing to call. It is a package of its own because device/cuda
// is compiled twice for tests, by itself and with the tests inside it, and C++ takes long.
package twins
