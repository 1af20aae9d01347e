// Package save has the verbs that write and verify files: Write, Convert, Verify,
// Inspect. A save classifies the tensors, lays out the files, encodes on all cores,
// writes, and publishes.
//
// Every file is written under a temporary name in its own folder, synced to the
// disk, and only then renamed: if a save is stopped by an error, a full disk, a
// cancel or a kill, readers find the old file or the new one. The bytes of a file
// depend on its tensors, its metadata, the Spec and the plain file that Convert
// compresses, never on the number of threads or on time; those of encrypted files
// also on random numbers.
//
// Memory: the caller's tensors are read in place (those on a GPU chunk by chunk),
// and a save allocates only a window of chunks (two or three per thread), 16 MiB for small tensors that are
// encoded once to be tried and written, and for those
// that a GPU encodes a pinned ring of less than 0.5 GB, which is kept for the next save. A
// save that is staged has all stored bytes in host memory. Convert and Verify hold the index of
// their sources and the same window.
package save

import (
	"context"
	"time"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/tensor"
)

// An Input is one tensor to save. Data are its bytes, contiguous, of exactly the
// size that shape and dtype give; they must stay valid and unchanged until the job
// ends.
type Input struct {
	Name  string
	DType tensor.DType
	Shape []int64
	Data  []byte
}

// Away is a tensor's memory outside the host: a GPU's.
type Away struct {
	Addr  uintptr // identifies the memory: equal for tensors that share it
	Bytes int64
	// GPU has the memory, and may encode it where it is; nil: none may.
	GPU *cuda.Device
	// Read fills dst from off, or fails. It is called in parallel.
	Read func(dst []byte, off int64) error
}

// A Spec says what to write. Its zero value, with a Path, writes one plain
// safetensors file with all cores.
type Spec struct {
	// Path is the file to write: "model.safetensors". A symbolic link is followed.
	// s3:// and redis:// are written without a local file: the object streams in
	// parts and becomes visible in one step. Of several files the index is
	// published last, and files of the old model are removed after that.
	// A path that ends in .tensors becomes a file of tensorizer's, without
	// compression or metadata; Storage.Encrypt is for such files only.
	Path string `json:"path"`
	// Metadata becomes `__metadata__`. The key "overwire" is reserved.
	Metadata map[string]string `json:"metadata,omitempty"`
	// Compress writes the container of docs/format.md instead of plain
	// safetensors. It is lossless, and still a safetensors file.
	Compress bool `json:"compress,omitempty"`
	// Level is how Compress weighs size against speed. "" or "default": the codec that
	// decodes at full speed, on a GPU too. "smaller": for each chunk the smaller of
	// that and of a codec that only the CPU decodes, and slowly; tensors in several
	// column parts stay as by default.
	Level string `json:"level,omitempty"`
	// Digests keeps the digest of each tensor in a container (docs/format.md 6), by
	// which a model in memory is compared without reading the tensors of the file.
	Digests bool `json:"digests,omitempty"`
	// NoSHA256 lets Convert keep none of the original, which one core computes for each
	// file. The original's header and the hashes of its tensors then prove it.
	NoSHA256 bool `json:"no_sha256,omitempty"`
	// Parts divides compressed tensors into 1, 2, 4 or 8 column parts, so that a
	// slice of dimension 1 is read alone. Tensors whose rows do not divide get the
	// most parts that do, and one that has an alias with rows of another size gets 1.
	// 0 means 1.
	Parts int `json:"parts,omitempty"`
	// Threads is how many cores to use at once; 0: all.
	Threads int `json:"threads,omitempty"`
	// Shard is the most tensor bytes in one file; 0: no limit. If the tensors do
	// not fit in one file, the files are named as huggingface names them, with an
	// index: model-00001-of-00002.safetensors and model.safetensors.index.json. A
	// larger tensor gets a file of its own. Over an earlier set the shards get names
	// of their own (modelfiles.Mark), and the index replaces the old one in one step.
	// Files of an earlier save of the path (its shards, the single file, the index)
	// are removed after that.
	Shard int64 `json:"shard,omitempty"`
	// ChunkBytes is the size of a chunk: a multiple of 4096, at most 16 MiB.
	// 0 means 1 MiB, which fits in a core's second-level cache with its
	// compressed form.
	ChunkBytes int64 `json:"-"`

	// Like is a local file whose mode, owner and ACL new files get if no file of
	// the model is replaced. "": the umask decides.
	Like string `json:"like,omitempty"`
	// Beside allows a single file beside the index of shards of the same name, by
	// which the folder is loaded. Otherwise that is refused.
	Beside bool `json:"beside,omitempty"`

	// Storage says how to reach remote files: the target, and what Convert reads.
	Storage format.Access `json:"storage,omitzero"`
	// Away has, by position, the tensors whose bytes are not in host memory: their
	// Input has no Data.
	Away map[int]*Away `json:"-"`
	// Pieces has, by position, the bytes of tensors that lie in several places of host
	// memory, one after the other: their Input has no Data.
	Pieces map[int][][]byte `json:"-"`
	// Staged, if not nil, is called once when the tensors may change again: all stored
	// bytes are in host memory, and the files are written from there.
	Staged func() `json:"-"`
	// MaxMemory is the most host memory that stored bytes may take then; 0: what there is.
	MaxMemory int64 `json:"max_memory,omitempty"`

	fs atomicfile.FS // nil: the disk; tests put a failing one here
}

// A Report says what was written. Bytes are logical on the way in and of whole
// files of weights on the way out; Ratio is out / in (1 if nothing came in). Files that
// were copied count apart: no tensor is in them.
type Report struct {
	BytesIn     int64    `json:"bytes_in"`
	BytesOut    int64    `json:"bytes_out"`
	BytesCopied int64    `json:"bytes_copied"`
	Ratio       float64  `json:"ratio"`
	Seconds     float64  `json:"seconds"`
	Stages      Stages   `json:"stages"`
	Tensors     int      `json:"tensors"`
	Compressed  int      `json:"compressed"`       // tensors stored compressed
	Aliases     int      `json:"aliases"`          // tensors stored as aliases
	OnGPU       int64    `json:"on_gpu,omitempty"` // bytes of BytesIn that a GPU encoded
	Staged      float64  `json:"staged,omitempty"` // seconds until the tensors could change
	Files       []string `json:"files"`            // written, in order; an index.json last
	Copied      []string `json:"copied,omitempty"` // of files: the other files of source folders, copied
	// of source folders, not copied: other weights, hidden files, links to outside, special files
	Left []string `json:"left,omitempty"`

	// Originals are the containers that keep the plain file that they were made
	// from, or the plain files that equal, byte for byte, the ones that were
	// compressed.
	Originals []Original `json:"originals,omitempty"`
	// Anew are plain files made from compressed ones that differ from the
	// originals: their sources keep none, or group tensors differently, or have
	// other metadata.
	Anew []string `json:"anew,omitempty"`
}

// hideUsers takes users and passwords out of the URIs of a report, which programs log.
func (r *Report) hideUsers() {
	for _, uris := range [][]string{r.Files, r.Copied, r.Left, r.Anew} {
		for i, uri := range uris {
			uris[i] = errs.HideUser(uri)
		}
	}
	for i := range r.Originals {
		r.Originals[i].File = errs.HideUser(r.Originals[i].File)
	}
}

// An Original is one file of a Report. SHA256 is that of the plain file in hex; "": it was
// not hashed, since it came over a network, or its container keeps no hash. Compared says that a decompressed file
// was held to the SHA256 of the one that was compressed.
type Original struct {
	File     string `json:"file"`
	SHA256   string `json:"sha256"`
	Compared bool   `json:"compared"`
}

// Write saves tensors. It checks every argument before it touches the target's
// folder. The job's counters rise as chunks are written; j may be nil.
func Write(ctx context.Context, j *job.Job, spec Spec, in []Input) (Report, error) {
	start := time.Now()
	if err := spec.checkSpec(); err != nil {
		return Report{}, err
	}
	items := make([]*item, len(in))
	for i := range in {
		t := &in[i]
		items[i] = &item{name: t.Name, dtype: t.DType, shape: t.Shape, bytes: int64(len(t.Data)), body: memory(t.Data)}
		if all := spec.Pieces[i]; len(all) > 0 {
			body := newScattered(all)
			items[i].bytes, items[i].body = body.ends[len(body.ends)-1], body
		}
		if a := spec.Away[i]; a != nil {
			items[i].bytes, items[i].body = a.Bytes, &away{Away: a}
		}
	}
	if err := checkItems(spec.Path, items); err != nil {
		return Report{}, err
	}
	w := newWriter(spec, j)
	defer w.closeGPUs()
	if err := w.openGPUs(items); err != nil {
		return Report{}, err
	}
	if err := w.prepareItems(ctx, items); err != nil {
		return Report{}, errs.Ended(ctx, err)
	}
	for _, t := range items {
		if a, ok := t.body.(*away); ok {
			a.ahead = nil
		}
	}
	parts := divideShards(spec, items)
	open := w.takeRings
	if spec.Staged != nil {
		open = func() error { return w.openStage(parts) }
	}
	if err := open(); err != nil {
		return Report{}, err
	}
	defer w.stage.freeStage()
	addLap(&w.clock.plan, w.start)
	rep, err := w.saveAll(ctx, parts)
	rep.OnGPU = w.onGPU.Load()
	rep.Seconds = time.Since(start).Seconds()
	rep.hideUsers()
	return rep, errs.Ended(ctx, err)
}

// IsBrief reports whether a save takes less than to wake another thread: little host memory becomes one file in
// memory, and nothing keeps it waiting.
func (s *Spec) IsBrief(in []Input) bool {
	const mostTensors, mostBytes = 1 << 10, 1 << 20
	bytes := 0
	for i := range in {
		bytes += len(in[i].Name) + len(in[i].Data)
	}
	for key, value := range s.Metadata {
		bytes += len(key) + len(value)
	}
	return len(in) <= mostTensors && bytes <= mostBytes && len(s.Away) == 0 && len(s.Pieces) == 0 && s.Staged == nil &&
		s.Shard == 0 && s.Level != levelSmaller && len(s.Storage.Encrypt) == 0 && source.Scheme(s.Path) == "" &&
		regular.IsInMemory(s.Path)
}

// checkSpec validates what does not depend on the tensors, and fills in defaults.
func (s *Spec) checkSpec() error {
	bad := func(format string, args ...any) error {
		return badArgument(s.Path, "", format, args...)
	}
	if s.Parts == 0 {
		s.Parts = 1
	}
	if s.ChunkBytes == 0 {
		s.ChunkBytes = 1 << 20
	}
	if s.fs == nil {
		s.fs = atomicfile.Disk{}
	}
	switch scheme := source.Scheme(s.Path); {
	case s.Path == "":
		return bad("no path to write to")
	case scheme == "file":
		path, err := source.FilePath(s.Path)
		if err != nil {
			return err
		}
		s.Path = path
	case scheme != "" && open.Writable(s.Path):
	case open.RecipeOf(scheme) != nil:
		return errs.In("save", s.Path, open.RecipeOf(scheme))
	case scheme != "":
		return errs.In("save", s.Path, errs.New(errs.ErrNotSupported,
			"writing to %s://: save to s3://, redis:// or a local file", scheme))
	}
	switch {
	case s.Parts != 1 && s.Parts != 2 && s.Parts != 4 && s.Parts != 8:
		return bad("parts must be 1, 2, 4 or 8, not %d", s.Parts)
	case s.ChunkBytes < 4096 || s.ChunkBytes%4096 != 0 || s.ChunkBytes > tensor.MaxChunkBytes:
		return bad("chunk_bytes must be a multiple of 4096 up to %d, not %d", tensor.MaxChunkBytes, s.ChunkBytes)
	case s.Level != "" && s.Level != "default" && s.Level != levelSmaller:
		return bad("level must be \"default\" or \"smaller\", not %q", s.Level)
	case s.Threads < 0:
		return bad("threads must not be negative")
	case s.Shard < 0:
		return bad("shard must not be negative")
	}
	if why := formatOf(s.Path).refuse(s); why != "" {
		return bad("%s", why)
	}
	return checkMetadata(s.Path, s.Metadata)
}

const levelSmaller = "smaller"

// badArgument is the caller's mistake about one target or tensor.
func badArgument(path, name, format string, args ...any) error {
	return errs.Locate("save", path, name, -1, errs.New(errs.ErrArgument, format, args...))
}
