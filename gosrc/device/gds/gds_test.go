package gds

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// compile compiles C source to a shared library.
func compile(t *testing.T, name, source string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	cmd := exec.Command("cc", "-shared", "-fPIC", "-x", "c", "-o", path, "-")
	cmd.Stdin = strings.NewReader(source)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return path
}

const calls = `
typedef struct { int err, cu_err; } status;
int opened;
status cuFileDriverOpen(void) { opened++; status s = {0, 0}; return s; }
long cuFileRead(void *h, void *p, unsigned long n, long at, long off) { return -1; }
`

// GPUDirect Storage is usable only with a library that has all functions, and a loaded module. The report names what is
// missing.
func TestProbe(t *testing.T) {
	dir := t.TempDir()
	loaded, none := filepath.Join(dir, "version"), filepath.Join(dir, "none")
	if err := os.WriteFile(loaded, []byte("version: 2.25.7\nmore: 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	empty := filepath.Join(dir, "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	// cuFileGetVersion returns a struct of two ints, and the first one is the error.
	full := compile(t, "libfull.so", calls+`status cuFileGetVersion(int *v) { *v = 1130; status s = {0, 0}; return s; }`)
	failing := compile(t, "libfailing.so", calls+`status cuFileGetVersion(int *v) { *v = 99; status s = {5011, 0}; return s; }`)
	old := compile(t, "libold.so", calls)
	other := compile(t, "libother.so", `int cuFileDriverOpen(void) { return 0; }`)
	for _, c := range []struct {
		library, module string
		want            Report
		why             string
	}{
		{full, loaded, Report{Usable: true, Library: full, Version: "1.13", Module: "2.25.7"}, "gdscheck"},
		{full, empty, Report{Usable: true, Library: full, Version: "1.13", Module: "unknown"}, "gdscheck"},
		{full, none, Report{Library: full, Version: "1.13"}, "nvidia-fs is not loaded"},
		{failing, loaded, Report{Usable: true, Library: failing, Module: "2.25.7"}, "gdscheck"},
		{old, none, Report{Library: old}, "nvidia-fs is not loaded"},
		{other, loaded, Report{Module: "2.25.7"}, "cuFileRead or cuFileDriverOpen is missing"},
		{filepath.Join(dir, "libnone.so"), loaded, Report{Module: "2.25.7"}, "libnone.so"},
		{filepath.Join(dir, "libnone.so"), none, Report{}, "neither"},
	} {
		got := probe([]string{filepath.Join(dir, "absent.so"), c.library}, c.module)
		why := got.Why
		got.Why = ""
		if got != c.want || !strings.Contains(why, c.why) {
			t.Errorf("%s, %s: %+v %q", c.library, c.module, got, why)
		}
	}
	if a, b := Probe(), Probe(); a != b || a.Why == "" {
		t.Errorf("%+v, then %+v", a, b)
	}
}
