package cache

// This file notes what stores said last, for callers that do not ask them.

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/file"
)

// A note is what a store said of a URI: an object's state, that there is none, or what a
// folder lists.
type note struct {
	Name   string   `json:"name"` // the file's: another URI's note is not this one's under its name
	Pin    string   `json:"pin,omitempty"`
	Size   int64    `json:"size,omitempty"`
	Absent bool     `json:"absent,omitempty"`
	List   []string `json:"list,omitempty"`
}

// maxNote bounds a note that is read.
const maxNote = 64 << 20

// notePath is where the note of a URI is. A query belongs to it, unlike to an object's key, which
// has a pin: it may choose the object.
func (c Folder) notePath(uri string) string {
	query := ""
	if _, hub := source.ParseHF(uri); !hub {
		query = strings.TrimPrefix(uri, source.Path(uri))
	}
	hash := sha256.Sum256([]byte(bareURI(uri) + "\x00" + query + "\x00" + c.storeOf(uri)))
	return filepath.Join(c.Path, hex.EncodeToString(hash[:16])+".note")
}

// writeNote replaces a note. One that cannot be written is not missed until the store is away.
func (c Folder) writeNote(uri string, n note) {
	n.Name = filepath.Base(c.notePath(uri))
	text, err := json.Marshal(n)
	if err != nil || c.makeFolder() != nil {
		return
	}
	var r [8]byte
	_, _ = rand.Read(r[:]) // cannot fail
	temp := c.notePath(uri) + "-" + hex.EncodeToString(r[:])
	if err = os.WriteFile(temp, text, fileMode); err == nil {
		err = os.Rename(temp, c.notePath(uri))
	}
	if err != nil {
		_ = os.Remove(temp)
	}
}

func (c Folder) read(uri string) (n note, ok bool) {
	path := c.notePath(uri)
	if regular.RefusePlanted(c.Path) != nil {
		return n, false
	}
	text, err := regular.ReadTrusted(path, maxNote)
	if err != nil || json.Unmarshal(text, &n) != nil || n.Name != filepath.Base(path) {
		return note{}, false
	}
	return n, true
}

// Absent notes that there is no such object.
func (c Folder) Absent(uri string) { c.writeNote(uri, note{Absent: true}) }

// Last is the object in the state in which the store had it last. errs.ErrNotFound: it had
// none then; nil, nil: nothing is known, or kept no more.
func (c Folder) Last(ctx context.Context, uri string) (source.Source, error) {
	n, ok := c.read(uri)
	switch {
	case !ok || n.Pin == "" && !n.Absent:
		return nil, nil
	case n.Absent:
		return nil, errs.In("open", uri, errs.New(errs.ErrNotFound,
			"the store had no such object when it was asked last"))
	}
	f := findKept(ctx, c.keyOf(uri, n.Pin, n.Size), n.Size)
	if f == nil {
		return nil, context.Cause(ctx)
	}
	defer f.Close()
	return file.FromFD(int(f.Fd()), uri)
}

// KeepList notes what a folder lists.
func (c Folder) KeepList(uri string, uris []string) { c.writeNote(uri, note{List: uris}) }

// LastList is what a folder listed last; nil: nothing is known.
func (c Folder) LastList(uri string) []string {
	n, _ := c.read(uri)
	return n.List
}
