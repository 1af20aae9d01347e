package load_test

import (
	"bytes"
	"cmp"
	"testing"

	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/load/loadtest"
)

// gdsLoad loads with GPUDirect Storage, compares every tensor, and returns the load's report.
func gdsLoad(t *testing.T, m *load.Model, opt load.Options, reqs []load.Request, want func(i int) []byte) (load.Report,
	error) {
	t.Helper()
	opt.Device, opt.Read = cmp.Or(opt.Device, "cuda:0"), "gds"
	l, err := m.Start(reqs, opt)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := loadtest.Finish(t, l); err != nil {
		return load.Report{}, err
	}
	for i, got := range loadtest.TakeBytes(t, l, 0) {
		if !bytes.Equal(got, want(i)) {
			t.Errorf("request %d differs", i)
		}
	}
	return l.Job().Value().(load.Report), nil
}
