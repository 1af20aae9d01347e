// Package publish writes the files of one save and gives them their names together, in a local folder or in a store.
// Until then, readers find the old files. A save that fails leaves no files.
//
// The package handles paths, bytes and the index.json of a set of shards, but not tensors. Package save imports it.
package publish

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Publication describes where the files of a save go, and which files may be there.
type Publication struct {
	Path       string          // a local path or a URI: the file, or the name from which shard names are made
	Remote     bool            // Path is a URI
	Sharded    bool            // the files replace an earlier set with that name, or a single file
	AllowIndex bool            // a single file may be next to a shard index with its name
	Like       string          // gives new files their mode if no file is replaced; "" means the umask
	Others     map[string]bool // names of other models' files that are written to the same folder
	Options    source.Options
	FS         atomicfile.FS // file system for local files
	Job        *job.Job
	WriteTime  *atomic.Int64 // writing time in nanoseconds is added to it
	// OnPublish, if not nil, gets each published object of a store. The caller can remove it if a later save fails.
	OnPublish func(source.Draft)

	mu     sync.Mutex
	places map[string]*atomicfile.Place
}

// A File is one file of a publication.
type File struct {
	Path    string
	Content *Prewritten // nil if the caller writes it
	Copied  bool        // Content is a copy of another file
	Shard   bool        // the index lists it
	Listing *Listing    // for an index.json; nil for other files
	Mode    fs.FileMode // limits the permissions of a new file; 0 means no limit

	Expected float64 // expected bytes, to check the free space
	Most     int64   // maximum bytes

	like string // file that gives it its mode; "" means the publication's
}

// A Destination takes the files of one publication and publishes them together.
type Destination interface {
	// Create begins file i. It is safe for concurrent use.
	Create(ctx context.Context, i int) (source.Output, error)
	// Publish gives the finished files their names. The last one is the file that readers look for. Then it removes
	// the remaining files of the old model.
	Publish(ctx context.Context) error
	// Drop ends the publication and removes unpublished files. err is the result of the save.
	Drop(err error)
}

// UndoAll removes published objects, the last one first, because it lists the others. It returns those that may remain,
// and why.
func UndoAll(objects []source.Draft) (remaining []string, why error) {
	for _, d := range slices.Backward(objects) {
		if err := d.UndoPublish(); err != nil {
			remaining, why = append(remaining, errs.HideUser(d.URI())), err
		}
	}
	return remaining, why
}

// followPath resolves a path. It remembers the first result, including the file that was there.
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

// readIndex reads an index. It returns nil if there is none, and an empty listing if the index is invalid.
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
	b := make([]byte, min(s.Size(), tensor.MaxHeader)) // an index is not larger than this
	if err := s.ReadAt(ctx, b, 0); err != nil {
		return nil, err
	}
	shards, _ := safetensors.ReadIndexJSON(index, b)
	return &shards, nil
}

// addTime adds the time since start to WriteTime.
func (p *Publication) addTime(start time.Time) { p.WriteTime.Add(int64(time.Since(start))) }

// JoinName returns the path or URI of a name in a folder. It does not clean the path, because ".." after a symbolic
// link does not undo the link.
func JoinName(dir, name string) string {
	if dir == "" || strings.HasSuffix(dir, "/") {
		return dir + name
	}
	return dir + "/" + name
}

// Extension is the suffix of shard names. It is appended if the path lacks it.
const Extension = ".safetensors"

// SplitStem divides a path into its folder and its name without the extension.
func SplitStem(path string) (dir, stem string) {
	dir, name := filepath.Split(path)
	return dir, strings.TrimSuffix(name, Extension)
}

// IndexPath returns the path of the index of a path's shards.
func IndexPath(path string) string {
	dir, stem := SplitStem(path)
	return JoinName(dir, stem+Extension+".index.json")
}

// Begin checks that files can be published, chooses the names of shards, and returns the destination for the files. The
// last file is the one that readers look for. The caller must call Drop.
func Begin(ctx context.Context, p *Publication, files []*File) (Destination, error) {
	if err := checkListable(files); err != nil {
		return nil, err
	}
	if err := refuseNextToIndex(ctx, p, files); err != nil {
		return nil, err
	}
	if err := chooseNames(ctx, p, files); err != nil {
		return nil, err
	}
	if p.Remote {
		return &objects{pub: p, files: files, drafts: make([]source.Draft, len(files))}, nil
	}
	return beginLocal(p, files)
}

// A Prewritten is a file with known content. Names and Tensors are the names and the total bytes of its tensors, for an
// index.json. Fill writes each byte of the file once, from one or several goroutines.
type Prewritten struct {
	Bytes   int64
	Names   []string
	Tensors int64
	Fill    func(ctx context.Context, write func(p []byte, off int64) error) error
}

// WholeFile returns a Prewritten with the content b.
func WholeFile(b []byte) *Prewritten {
	const step, writers = 8 << 20, 2 // file systems serialize the writes of a file
	fill := func(ctx context.Context, write func(p []byte, off int64) error) error {
		return spawn.Each(ctx, "save.write", writers, (len(b)+step-1)/step, func(i int) error {
			return write(b[i*step:min(len(b), (i+1)*step)], int64(i*step))
		})
	}
	return &Prewritten{Bytes: int64(len(b)), Fill: fill}
}
