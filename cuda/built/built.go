// Package built holds the compiled GPU kernels. cuda/built/build.sh writes the
// files here; tests/test_kernels.py compares them with the sources.
package built
