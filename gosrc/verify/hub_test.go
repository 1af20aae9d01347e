package verify

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/source"
)

// A plain file from the Hub is compared with the SHA-256 that the download recorded. If it was written to later, or has
// a short ETag, only its structure is verified.
func TestVerifyHub(t *testing.T) {
	golden := filepath.Join(goldens, goldenVersion, "plain.safetensors")
	sum, dir := sha256Of(t, golden), t.TempDir()
	good, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	bad := slices.Clone(good)
	bad[len(bad)-1] ^= 1 // a bit of a tensor
	put := func(name string, b []byte) string {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, b, 0o600)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	note := func(name, etag string, age time.Duration) {
		seconds := float64(time.Now().Add(-age).UnixNano()) / 1e9
		put(".cache/huggingface/download/"+name+".metadata", fmt.Appendf(nil, "abc\n%s\n%f\n", etag, seconds))
	}
	note("unet/whole.safetensors", sum, 0)
	note("damaged.safetensors", sum, 0)
	note("later.safetensors", sum, time.Hour)
	note("short.safetensors", "0123abcd", 0)
	for _, blob := range []string{"whole", "damaged"} {
		link := filepath.Join(dir, "snapshots", "c0", blob+".safetensors")
		b := map[string][]byte{"whole": good, "damaged": bad}[blob]
		err := errors.Join(os.MkdirAll(filepath.Dir(link), 0o700), os.Symlink(put(blob+"/blobs/"+sum, b), link))
		if err != nil {
			t.Fatal(err)
		}
	}
	for path, checked := range map[string]string{
		put("unet/whole.safetensors", good): "contents", put("damaged.safetensors", bad): "",
		put("later.safetensors", bad): "structure", put("short.safetensors", bad): "structure",
		dir + "/snapshots/c0/whole.safetensors": "contents", dir + "/snapshots/c0/damaged.safetensors": "",
		"file://" + dir + "/unet/whole.safetensors": "contents",
	} {
		v, err := Verify(bg, nil, []string{path}, format.Access{}, false)
		if checked == "" {
			if !errors.Is(err, errs.ErrCorrupt) || !strings.Contains(err.Error(), sum) || v.OK {
				t.Errorf("%s: %+v %v", path, v, err)
			}
		} else if err != nil || v.Files[0].Checked != checked || (v.Note == "") != (checked == "contents") ||
			(v.Files[0].SHA256 == sum) != (checked == "contents") || (v.Bytes > 0) != (checked == "contents") {
			t.Errorf("%s: %+v %v", path, v, err)
		}
	}
}

// Files of the Hub and GGUF files are also compared with the Hub's SHA-256. A store's own ETag is not used.
func TestVerifyOnTheHub(t *testing.T) {
	plain, err := os.ReadFile(filepath.Join(goldens, goldenVersion, "plain.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	u64 := binary.LittleEndian.AppendUint64
	g := u64(u64([]byte("GGUF\x03\x00\x00\x00"), 1), 0) // a tensor, no metadata
	g = append(u64(g, 1), "w\x01\x00\x00\x00"...)
	g = u64(append(u64(g, 8), 0, 0, 0, 0), 0) // 8 elements of F32 at 0
	g = append(append(g, make([]byte, 32-len(g)%32)...), make([]byte, 32)...)
	files := map[string][]byte{"m.safetensors": plain, "m.gguf": g}
	damaged := func(name string) []byte {
		b := slices.Clone(files[name])
		b[len(b)-1] ^= 1
		return b
	}
	sumOf := func(b []byte) string { return fmt.Sprintf("%x", sha256.Sum256(b)) }
	store := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b := files[path.Base(r.URL.Path)]
		if strings.HasPrefix(r.URL.Path, "/damaged/") {
			b = damaged(path.Base(r.URL.Path))
		}
		w.Header().Set("ETag", `"`+sumOf([]byte("another object"))+`"`)
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(b))
	}))
	defer store.Close()
	hub := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		parts := strings.Split(r.URL.Path, "/") // /org/REPO/resolve/main/FILE
		repo, file := parts[2], parts[5]
		if files[file] == nil {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		w.Header().Set("X-Repo-Commit", strings.Repeat("a", 40))
		sum := sumOf(files[file])
		if repo == "short" {
			sum = sum[:40]
		}
		w.Header().Set("X-Linked-ETag", `"`+sum+`"`)
		http.Redirect(w, r, store.URL+"/"+repo+"/"+file, http.StatusFound)
	}))
	defer hub.Close()
	access := format.Access{Options: source.Options{Env: map[string]string{"HF_ENDPOINT": hub.URL, "HF_HOME": t.TempDir()}}}
	for file, b := range files {
		v, err := Verify(bg, nil, []string{"hf://org/whole/" + file}, access, false)
		if err != nil || v.Files[0].Checked != "contents" || v.Files[0].SHA256 != sumOf(b) || v.Note != "" || !v.OK {
			t.Errorf("%s: %+v, %v", file, v, err)
		}
		v, err = Verify(bg, nil, []string{"hf://org/damaged/" + file}, access, false)
		if !errors.Is(err, errs.ErrCorrupt) || !strings.Contains(err.Error(), sumOf(b)) || v.OK {
			t.Errorf("damaged %s: %+v, %v", file, v, err)
		}
		v, err = Verify(bg, nil, []string{"hf://org/short/" + file}, access, false)
		if err != nil || v.Files[0].Checked != "structure" || v.Note == "" {
			t.Errorf("%s without a SHA-256: %+v, %v", file, v, err)
		}
		for dir, b := range map[string][]byte{"good": b, "bad": damaged(file)} { // as huggingface_hub's cache
			blob := filepath.Join(t.TempDir(), "blobs", sumOf(files[file]))
			link := filepath.Join(filepath.Dir(filepath.Dir(blob)), file)
			err := errors.Join(os.Mkdir(filepath.Dir(blob), 0o700), os.WriteFile(blob, b, 0o600),
				os.Symlink(blob, link))
			if err != nil {
				t.Fatal(err)
			}
			v, err := Verify(bg, nil, []string{link}, format.Access{}, false)
			if dir == "good" && (err != nil || v.Files[0].SHA256 != sumOf(b)) ||
				dir == "bad" && !errors.Is(err, errs.ErrCorrupt) {
				t.Errorf("%s, %s: %+v, %v", file, dir, v, err)
			}
		}
	}
}
