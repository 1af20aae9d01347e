//go:build !owfake

package load_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/overwire/overwire/gosrc/device/gds"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/load/loadtest"
	"github.com/overwire/overwire/gosrc/save"
)

// NVIDIA's libcufile accepts our calls. Without the module nvidia-fs it copies through the
// host, which loads refuse. This test pretends that the module is loaded.
func TestGDSLibrary(t *testing.T) {
	loadtest.UseEngine(t)
	found := gds.Probe()
	if found.Library == "" {
		t.Skip(found.Why)
	}
	module := filepath.Join(t.TempDir(), "version")
	if err := os.WriteFile(module, []byte("version: pretended\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(gds.Use(found.Library, module))
	_, m, want := loadtest.WriteModel(t, save.Spec{}, "hostile", 64<<20)
	rep, err := gdsLoad(t, m, load.Options{}, nil, loadtest.BytesOf(m, want))
	if err != nil {
		t.Fatal(err)
	}
	if rep.NoGDS != "" {
		t.Skip(rep.NoGDS)
	}
	if rep.GDS < rep.Bytes {
		t.Errorf("%d of %d bytes with GPUDirect Storage", rep.GDS, rep.Bytes)
	}
	t.Logf("%d bytes by %s %s (%s)", rep.GDS, found.Library, found.Version, found.Why)
}
