//go:build cgo && owfake

package twins

import "C" // compiles twins.cc
