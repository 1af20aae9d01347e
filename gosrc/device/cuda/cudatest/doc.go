// Package cudatest is a driver without a GPU, for tests (build tag owfake). It runs the kernels compiled for the host.
// fake.h lists the rules that it enforces. It is a separate package because device/cuda is compiled twice for tests,
// with and without its tests, and C++ compiles slowly.
package cudatest
