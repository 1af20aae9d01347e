package http

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

// nginx starts a real nginx over a folder. It returns the folder and the addresses of three servers: with
// ranges, without ranges, and with TLS.
func nginx(t *testing.T) (dir, ranges, plain, secure string, c certs) {
	t.Helper()
	program, err := exec.LookPath("nginx")
	if err != nil {
		if program = "/usr/sbin/nginx"; !executable(program) {
			t.Skip("nginx is not installed (Debian: nginx-light)")
		}
	}
	dir = t.TempDir()
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil { // nginx's workers run as another user
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	work := t.TempDir()
	c = makeCerts(t)
	var at []string
	var held []net.Listener // open together, so that all ports differ
	for range 3 {
		l, err := net.Listen("tcp", sourcetest.Host()+":0")
		if err != nil {
			t.Fatal(err)
		}
		at, held = append(at, l.Addr().String()), append(held, l)
	}
	for _, l := range held {
		_ = l.Close()
	}
	user := ""
	if os.Getuid() == 0 {
		user = "user root;"
	}
	conf := filepath.Join(work, "nginx.conf")
	text := fmt.Sprintf(`daemon off; worker_processes 1; pid %[1]s/pid; error_log %[1]s/error.log; %[7]s
events { worker_connections 512; }
http {
	access_log off; sendfile on; root %[2]s; default_type application/octet-stream;
	client_body_temp_path %[1]s/b; proxy_temp_path %[1]s/p; fastcgi_temp_path %[1]s/f; uwsgi_temp_path %[1]s/u; scgi_temp_path %[1]s/s;
	gzip on; gzip_types *; gzip_min_length 1;
	server { listen %[3]s; location /gone { return 302 http://%[4]s/x; } }
	server { listen %[4]s; max_ranges 0; }
	server { listen %[5]s ssl; ssl_certificate %[6]s; ssl_certificate_key %[8]s; }
}
`, work, dir, at[0], at[1], at[2], c.good, user, c.key)
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "-p", work, "-e", filepath.Join(work, "error.log"), "-c", conf)
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	})
	for n := 0; ; n++ {
		if conn, err := net.Dial("tcp", at[2]); err == nil {
			conn.Close()
			break
		}
		if n == 200 {
			log, _ := os.ReadFile(filepath.Join(work, "error.log"))
			t.Fatalf("nginx does not start: %s %s", said.String(), log)
		}
		time.Sleep(20 * time.Millisecond)
	}
	return dir, "http://" + at[0] + "/", "http://" + at[1] + "/", "https://" + at[2] + "/", c
}

func executable(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.Mode()&0o111 != 0
}

var hours time.Duration

// writeOld writes a file with a date that is an hour older than that of the previous file.
func writeOld(t *testing.T, path string, data []byte) {
	t.Helper()
	hours += time.Hour
	at := time.Now().Add(-hours)
	if err := errors.Join(os.WriteFile(path, data, 0o644), os.Chtimes(path, at, at)); err != nil {
		t.Fatal(err)
	}
}

// A real server passes the common suite, with and without ranges and with TLS. A replaced file is detected.
func TestNginx(t *testing.T) {
	dir, ranges, plain, secure, c := nginx(t)
	for base, storage := range map[string]map[string]string{ranges: nil, plain: nil, secure: {"cacert": c.ca}} {
		sourcetest.Suite(t, sourcetest.Is{Remote: true, InOrder: base == plain, Stepped: base != plain, Known: true},
			func(t *testing.T, data []byte) source.Source {
				writeOld(t, filepath.Join(dir, "x"), data)
				return opened(t, base+"x", storage)
			})
	}
	data := random(3 << 20)
	path := filepath.Join(dir, "x")
	writeOld(t, path, data)
	for _, uri := range []string{ranges + "x", plain + "x", ranges + "gone"} {
		src := opened(t, uri, nil)
		p := make([]byte, len(data))
		if err := src.ReadAt(context.Background(), p, 0); err != nil || !bytes.Equal(p, data) {
			t.Errorf("%s: %v, or wrong bytes", uri, err)
		}
		if ranged := src.Facts().Concurrency > 1; ranged != (uri == ranges+"x") {
			t.Errorf("%s: ranges %v", uri, ranged)
		}
	}
	begun := time.Now()
	if err := os.Chtimes(path, begun, begun); err != nil {
		t.Fatal(err)
	}
	// nginx derives ETags from the size and a date in seconds, so a different file could still get the same ETag.
	if fresh := opened(t, ranges+"x", nil); fresh.pin() != "" && time.Since(begun) < settle {
		t.Errorf("%q pins a file that may change within this second", fresh.pin())
	}
	writeOld(t, path, data)
	src := opened(t, ranges+"x", nil)
	next := random(3<<20 + 1)
	if err := errors.Join(os.WriteFile(path+".new", next, 0o644),
		os.Chtimes(path+".new", time.Now(), time.Now().Add(-time.Hour)), os.Rename(path+".new", path)); err != nil {
		t.Fatal(err)
	}
	if err := src.ReadAt(context.Background(), make([]byte, 1000), 1<<20); !errors.Is(err, errs.ErrCorrupt) ||
		!strings.Contains(err.Error(), "changed while it was read") {
		t.Errorf("%v", err)
	}
	if _, err := new(Hub).Open(context.Background(), ranges+"none", source.Options{}); !errors.Is(err,
		errs.ErrNotFound) {
		t.Errorf("%v", err)
	}
}
