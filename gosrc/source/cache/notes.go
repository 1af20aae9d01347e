package cache

// This file records the last responses of stores, for use without asking the store.

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
)

// A note is a store's last response for a URI: an object's state, its absence, or a folder's listing.
type note struct {
	Name   string   `json:"name"` // the note's file name, so that another URI's note does not match
	Pin    string   `json:"pin,omitempty"`
	Size   int64    `json:"size,omitempty"`
	SHA256 string   `json:"sha256,omitempty"` // the object's hash according to the store
	Absent bool     `json:"absent,omitempty"`
	List   []string `json:"list,omitempty"`
}

// maxNote is the largest note that is read, in bytes.
const maxNote = 64 << 20

// notePath returns the path of a URI's note. It depends on the query, which may select the object. The key of
// an object does not depend on the query because it contains the pin.
func (c Folder) notePath(uri string) string {
	query := ""
	if _, hub := source.ParseHF(uri); !hub {
		query = strings.TrimPrefix(uri, source.Path(uri))
	}
	hash := sha256.Sum256([]byte(source.BareURI(uri) + "\x00" + query + "\x00" + c.storeOf(uri)))
	return filepath.Join(c.Path, hex.EncodeToString(hash[:16])+".note")
}

// writeNote replaces a note. It ignores errors: a missing note only matters while the store cannot be reached.
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

// Absent records that the object does not exist.
func (c Folder) Absent(uri string) { c.writeNote(uri, note{Absent: true}) }

// Last returns the object in the state that the store last reported. It returns errs.ErrNotFound if the object
// did not exist then. It returns nil, nil if nothing is known or the object is not in the folder.
func (c Folder) Last(ctx context.Context, uri string) (source.Source, error) {
	n, ok := c.read(uri)
	switch {
	case !ok || n.Pin == "" && !n.Absent:
		return nil, nil
	case n.Absent:
		return nil, errs.In("open", uri, errs.New(errs.ErrNotFound,
			"the object did not exist when the store was last asked"))
	}
	f := findKept(ctx, c.keyOf(uri, n.Pin, n.Size), n.Size)
	if f == nil {
		return nil, context.Cause(ctx)
	}
	defer f.Close()
	return openKept(f, uri, n.SHA256)
}

// KeepList records a folder's listing.
func (c Folder) KeepList(uri string, uris []string) { c.writeNote(uri, note{List: uris}) }

// LastList returns a folder's last recorded listing, or nil.
func (c Folder) LastList(uri string) []string {
	n, _ := c.read(uri)
	return n.List
}
