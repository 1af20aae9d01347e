package convert

// This file gives shared helpers short names.

import (
	"context"

	"github.com/overwire/overwire/gosrc/save/savetest"
)

const goldens = savetest.Goldens

var (
	bg                            = context.Background()
	newRand, fixedRand            = savetest.NewRand, savetest.FixedRand
	gaussian, bf16                = savetest.Gaussian, savetest.BF16
	input, some                   = savetest.Input, savetest.Some
	read, same, write             = savetest.Read, savetest.Same, savetest.Write
	put, names, sha256Of, noTemps = savetest.Put, savetest.Names, savetest.SHA256Of, savetest.NoTemps
)
