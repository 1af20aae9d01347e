//go:build cgo && owfake

package cudatest

/*
#cgo CFLAGS: -std=gnu11 -Wall -Wextra -O2
*/
import "C" // compiles fake.c and twins.cc
