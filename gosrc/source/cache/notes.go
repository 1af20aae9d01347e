package cache

// This file records what stores last said, for callers that do not ask them.

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

// A note is what a store said about a URI: an object's state, that there is no object, or a folder's listing.
type note struct {
	Name   string   `json:"name"` // the file's; the note of another URI must not pass under this name
	Pin    string   `json:"pin,omitempty"`
	Size   int64    `json:"size,omitempty"`
	Absent bool     `json:"absent,omitempty"`
	List   []string `json:"list,omitempty"`
}

// maxNote bounds a note that is read.
const maxNote = 64 << 20

// notePath is the path of a URI's note. It includes the query, since the query may select the object. An object's
// key leaves the query out, because it has a pin.
func (c Folder) notePath(uri string) string {
	query := ""
	if _, hub := source.ParseHF(uri); !hub {
		query = strings.TrimPrefix(uri, source.Path(uri))
	}
	hash := sha256.Sum256([]byte(bareURI(uri) + "\x00" + query + "\x00" + c.storeOf(uri)))
	return filepath.Join(c.Path, hex.EncodeToString(hash[:16])+".note")
}

// writeNote replaces a note. It ignores errors: a missing note only matters once the store cannot be reached.
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

// Absent records that there is no such object.
func (c Folder) Absent(uri string) { c.writeNote(uri, note{Absent: true}) }

// Last returns the object in the state that the store last reported. errs.ErrNotFound means that there was no
// object then; nil, nil that nothing is known or the object is no longer kept.
func (c Folder) Last(ctx context.Context, uri string) (source.Source, error) {
	n, ok := c.read(uri)
	switch {
	case !ok || n.Pin == "" && !n.Absent:
		return nil, nil
	case n.Absent:
		return nil, errs.In("open", uri, errs.New(errs.ErrNotFound,
			"the store had no such object when it was last asked"))
	}
	f := findKept(ctx, c.keyOf(uri, n.Pin, n.Size), n.Size)
	if f == nil {
		return nil, context.Cause(ctx)
	}
	defer f.Close()
	return file.FromFD(int(f.Fd()), uri)
}

// KeepList records a folder's listing.
func (c Folder) KeepList(uri string, uris []string) { c.writeNote(uri, note{List: uris}) }

// LastList is a folder's last recorded listing, nil if there is none.
func (c Folder) LastList(uri string) []string {
	n, _ := c.read(uri)
	return n.List
}
