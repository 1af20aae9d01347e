package verify

// This file gives shared helpers short names.

import (
	"context"

	"github.com/overwire/overwire/gosrc/save/savetest"
)

const goldens = savetest.Goldens

var (
	bg                 = context.Background()
	newRand, fixedRand = savetest.NewRand, savetest.FixedRand
	bf16               = savetest.BF16
	some               = savetest.Some
	read, same, write  = savetest.Read, savetest.Same, savetest.Write
	sha256Of           = savetest.SHA256Of
)
