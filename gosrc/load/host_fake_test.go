//go:build owfake

package load_test

import (
	"path/filepath"
	"testing"

	"github.com/overwire/overwire/gosrc/hoststore"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/load/loadtest"
	"github.com/overwire/overwire/gosrc/save"
)

// A load to a GPU reads the store's memory. An open model keeps this memory after the store has ended. A model that is
// opened after that reads the file.
func TestLoadsFromTheHostStore(t *testing.T) {
	loadtest.UseEngine(t)
	path, m, want := loadtest.WriteModel(t, save.Spec{Compress: true, ChunkBytes: 64 << 10}, "llama-bf16", 3<<20)
	m.Close()
	socket := filepath.Join(t.TempDir(), "s")
	t.Cleanup(func() { knob.Load(nil) })
	knob.Load(map[string]string{"OVERWIRE_HOST": socket})
	store, err := hoststore.Listen(hoststore.Options{Socket: socket, Budget: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	open := func(held int) *load.Model {
		t.Helper()
		yes := true
		m, err := load.Open(t.Context(), load.Spec{URIs: []string{path}, Host: &yes})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(m.Close)
		if m.FromHost() != held {
			t.Fatalf("%d files from the store, expected %d", m.FromHost(), held)
		}
		return m
	}
	first := open(0)
	loadtest.LoadAll(t, first, want, 0)
	first.Close()
	if !hoststore.AwaitPuts(1 << 36) {
		t.Fatal("the file was not put into the store")
	}
	held := open(1)
	loadtest.LoadAll(t, held, want, 0)
	store.Close()
	loadtest.LoadAll(t, held, want, 0)
	held.Close()
	loadtest.LoadAll(t, open(0), want, 0)
}
