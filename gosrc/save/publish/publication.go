// Package publish writes the files of one save and gives them their names together, in a folder of this host or
// in a store: until then, readers find the old files. A save that fails leaves nothing.
//
// It knows paths, bytes and the index.json of a set of shards, and nothing of tensors. Package save imports it.
package publish

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Publication says where the files of a save go, and which files may be there.
type Publication struct {
	Path       string          // a local path or a URI: the file, or the name that shards are named after
	Remote     bool            // Path is a URI
	Sharded    bool            // the files replace an earlier set of that name, or a single file
	AllowIndex bool            // a single file may lie next to an index of shards of its name
	Like       string          // gives a new file its mode if no file of the model is replaced; "": the umask does
	Others     map[string]bool // files of other models, by name, that are written to the same folder
	Options    source.Options
	FS         atomicfile.FS // of local files
	Job        *job.Job
	WriteTime  *atomic.Int64 // gets the nanoseconds that writing takes

	mu     sync.Mutex
	places map[string]*atomicfile.Place
}

// A File is one file of a publication.
type File struct {
	Path    string
	Content *Prewritten // nil: the caller writes it
	Copied  bool        // Content is a copy of another file
	Shard   bool        // the index lists it
	Listing *Listing    // of an index.json; nil for other files
	Mode    fs.FileMode // the most rights of a new file; 0: no limit

	Expected float64 // bytes, for the check of free space
	Most     int64   // an upper bound of its bytes

	like string // a file that gives it its mode; "": the publication's
}

// A Draft is one file that is being written. Readers do not see it until it is published; see source.Draft.
type Draft interface {
	URI() string
	Write(p []byte, off int64) error
	// WriteView is Write of bytes that stay until the save ends.
	WriteView(p []byte, off int64) error
	Skip(lo, hi int64) error
	Finish(size int64) error
}

// A Destination takes the files of one publication and publishes them together.
type Destination interface {
	// Create begins file i. It is safe for concurrent use.
	Create(ctx context.Context, i int) (Draft, error)
	// Publish gives the finished files their names, the last one being the file that readers look for. Then it
	// removes what is left of the old model.
	Publish(ctx context.Context) error
	// Drop ends the publication and removes what was not published; err is the outcome of the save.
	Drop(err error)
}

// followPath says where a path leads and which file was there when the save first asked.
func (p *Publication) followPath(path string) (*atomicfile.Place, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if place := p.places[path]; place != nil {
		return place, nil
	}
	place, err := atomicfile.Follow(path)
	if err == nil {
		if p.places == nil {
			p.places = map[string]*atomicfile.Place{}
		}
		p.places[path] = place
	}
	return place, err
}

// readIndex reads an index; nil if there is none. A damaged one names nothing.
func (p *Publication) readIndex(ctx context.Context, index string) (*safetensors.Shards, error) {
	if !source.Remote(index) {
		if _, err := os.Lstat(index); errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
	}
	s, err := open.With(p.Options).Open(ctx, index)
	if errors.Is(err, errs.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer s.Close()
	b := make([]byte, min(s.Size(), tensor.MaxHeader)) // a larger one is not ours
	if err := s.ReadAt(ctx, b, 0); err != nil {
		return nil, err
	}
	shards, _ := safetensors.ReadIndexJSON(index, b)
	return &shards, nil
}

// addTime adds the time since start to the publication's.
func (p *Publication) addTime(start time.Time) { p.WriteTime.Add(int64(time.Since(start))) }

// JoinName is the path or URI of a name in a folder. It does not clean the path, since ".." after a symbolic
// link is not the element before it.
func JoinName(dir, name string) string {
	if dir == "" || strings.HasSuffix(dir, "/") {
		return dir + name
	}
	return dir + "/" + name
}

// Extension is the end of shard names; it is appended if the path lacks it.
const Extension = ".safetensors"

// SplitStem divides a path into its folder and its name without the extension.
func SplitStem(path string) (dir, stem string) {
	dir, name := filepath.Split(path)
	return dir, strings.TrimSuffix(name, Extension)
}

// IndexPath is the path of the index of a path's shards.
func IndexPath(path string) string {
	dir, stem := SplitStem(path)
	return JoinName(dir, stem+Extension+".index.json")
}
