// Package built embeds the compiled GPU kernels. build.sh compiles them, and tests/house/test_kernels.py checks that
// they match the sources.
package built
