// Package cudatest is a driver without a GPU, for the tests of device/cuda (build tag
// owfake; ../fake.h says how to use it), and the kernels compiled for the host, which it
// runs. C calls both; Go has nothing to call. It is a package of its own because device/cuda
// is compiled twice for tests, by itself and with the tests inside it, and C++ takes long.
package cudatest
