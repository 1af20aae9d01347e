// Package cudatest is a driver without a GPU, for tests (build tag owfake; fake.h says what
// it holds its users to), and the kernels compiled for the host, which it runs. It is a
// package of its own because device/cuda is compiled twice for tests, by itself and with the
// tests inside it, and C++ takes long.
package cudatest
