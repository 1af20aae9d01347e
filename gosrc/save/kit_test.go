package save_test

// This file gives shared helpers short names.

import (
	"context"
	"testing"

	"github.com/overwire/overwire/gosrc/convert"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/save/savetest"
)

const goldens = savetest.Goldens

var (
	bg                            = context.Background()
	newRand, fixedRand            = savetest.NewRand, savetest.FixedRand
	gaussian, noise, bf16         = savetest.Gaussian, savetest.Noise, savetest.BF16
	input, ugly, some, of         = savetest.Input, savetest.Ugly, savetest.Some, savetest.Of
	read, same, write             = savetest.Read, savetest.Same, savetest.Write
	put, names, sha256Of, noTemps = savetest.Put, savetest.Names, savetest.SHA256Of, savetest.NoTemps
)

func convertTo(t testing.TB, src []string, dst string, spec save.Spec) save.Report {
	t.Helper()
	rep, err := convert.Convert(bg, nil, src, dst, spec)
	if err != nil {
		t.Fatal(err)
	}
	return rep
}
