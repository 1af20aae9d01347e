package save

// This file describes what a save writes, and reports it.

import (
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/save/original"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/stored"
	"github.com/overwire/overwire/gosrc/tensor"
)

// An Input is one tensor to save. Its bytes are Data, Pieces or Device: contiguous, of exactly the size that shape
// and dtype give. They must stay valid and unchanged until the job ends.
type Input struct {
	Name   string
	DType  tensor.DType
	Shape  []int64
	Data   []byte
	Pieces [][]byte      // bytes in several places of host memory, one after the other
	Device *DeviceMemory // bytes outside host memory
}

// DeviceMemory is a tensor's memory outside the host: a GPU's.
type DeviceMemory struct {
	Addr  uintptr // identifies the memory: equal for tensors that share it
	Bytes int64
	// GPU has the memory, and may encode it where it is; nil: the host encodes it.
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
	// decodes at full speed, also on a GPU. "smaller": for each chunk the smaller of
	// that and of a codec that only the CPU decodes, and slowly; tensors in several
	// column parts stay as by default.
	Level string `json:"level,omitempty"`
	// Digests stores the digest of each tensor in a container (docs/format.md 6), by
	// which a model in memory is compared without reading the tensors of the file.
	Digests bool `json:"digests,omitempty"`
	// NoSHA256 lets a conversion store no SHA-256 of the original, which one core computes for each
	// file. The original's header and the hashes of its tensors then prove it.
	NoSHA256 bool `json:"no_sha256,omitempty"`
	// Parts divides compressed tensors into 1, 2, 4 or 8 column parts, so that only a part is read for
	// a slice of dimension 1. Tensors with rows that do not divide get the
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

	// Like is a local file: new files get its mode, owner and ACL if no file of
	// the model is replaced. "": the umask decides.
	Like string `json:"like,omitempty"`
	// Beside allows a single file next to the index of shards of the same name, by
	// which the folder is loaded. Otherwise that is refused.
	Beside bool `json:"beside,omitempty"`

	// Storage says how to reach remote files: the target, and the sources of a conversion.
	Storage format.Access `json:"storage,omitzero"`
	// Staging, if not nil, holds all stored bytes in host memory before files are written.
	Staging *Staging `json:"-"`

	// FS is the disk, if nil; tests put a failing one here.
	FS atomicfile.FS `json:"-"`
}

// Staging lets the tensors change before a save has ended.
type Staging struct {
	// Done, if not nil, is called once when they may: the files are written from host memory.
	Done func()
	// MaxMemory is the most host memory that stored bytes may take; 0: what there is.
	MaxMemory int64
}

const levelSmaller = "smaller"

// check validates what does not depend on the tensors, and fills in defaults. path is for messages.
func (s *Spec) check(path string) error {
	bad := func(format string, args ...any) error { return badArgument(path, "", format, args...) }
	if s.Parts == 0 {
		s.Parts = 1
	}
	if s.ChunkBytes == 0 {
		s.ChunkBytes = 1 << 20
	}
	if s.FS == nil {
		s.FS = atomicfile.Disk{}
	}
	switch {
	case s.Parts != 1 && s.Parts != 2 && s.Parts != 4 && s.Parts != 8:
		return bad("parts must be 1, 2, 4 or 8, not %d", s.Parts)
	case s.ChunkBytes < 4096 || s.ChunkBytes%4096 != 0 || s.ChunkBytes > tensor.MaxChunkBytes:
		return bad("chunk_bytes must be a multiple of 4096 up to %d, not %d", tensor.MaxChunkBytes, s.ChunkBytes)
	case s.Level != "" && s.Level != "default" && s.Level != levelSmaller:
		return bad("level must be \"default\" or \"smaller\", not %q", s.Level)
	case s.Threads < 0:
		return bad("threads must be 0 or more, not %d", s.Threads)
	case s.Shard < 0:
		return bad("shard must be 0 or more, not %d", s.Shard)
	}
	return nil
}

// IsBrief reports whether a save takes less time than waking another thread: a little host memory becomes one
// file in memory, without waiting for a disk or a server.
func (s *Spec) IsBrief(in []Input) bool {
	const mostTensors, mostBytes = 1 << 10, 1 << 20
	if len(in) > mostTensors {
		return false
	}
	bytes := 0
	for i := range in {
		if in[i].Device != nil || in[i].Pieces != nil {
			return false
		}
		bytes += len(in[i].Name) + len(in[i].Data)
	}
	for key, value := range s.Metadata {
		bytes += len(key) + len(value)
	}
	return bytes <= mostBytes && s.Staging == nil && s.Shard == 0 && s.Level != levelSmaller &&
		len(s.Storage.Encrypt) == 0 && source.Scheme(s.Path) == "" && regular.IsInMemory(s.Path)
}

// badArgument is the caller's mistake about one target or tensor.
func badArgument(path, name, format string, args ...any) error {
	return errs.Locate("save", path, name, -1, errs.New(errs.ErrArgument, format, args...))
}

// A Report says what was written. Bytes are logical on the way in and of whole
// files of weights on the way out; Ratio is out / in (1 if nothing came in). Files that
// were copied count apart: they have no tensors.
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
	Copied      []string `json:"copied,omitempty"` // of files: the auxiliary files of source folders
	// of source folders, not copied: other weights, hidden files, links to outside, special files
	Left []string `json:"left,omitempty"`

	// Originals are the containers that store the plain file that they were made
	// from, or the plain files that equal, byte for byte, the ones that were
	// compressed.
	Originals []original.Summary `json:"originals,omitempty"`
	// Anew are plain files made from compressed ones that differ from the
	// originals: their sources store none, or group tensors differently, or have
	// other metadata.
	Anew []string `json:"anew,omitempty"`
}

// HideUsers removes users and passwords from the URIs of a report, which programs log.
func (r *Report) HideUsers() {
	for _, uris := range [][]string{r.Files, r.Copied, r.Left, r.Anew} {
		for i, uri := range uris {
			uris[i] = errs.HideUser(uri)
		}
	}
	for i := range r.Originals {
		r.Originals[i].File = errs.HideUser(r.Originals[i].File)
	}
}

// Add adds the report of other files.
func (r *Report) Add(o Report) {
	r.BytesIn += o.BytesIn
	r.BytesOut += o.BytesOut
	r.BytesCopied += o.BytesCopied
	r.Stages.addStages(o.Stages)
	r.Tensors += o.Tensors
	r.Compressed += o.Compressed
	r.Aliases += o.Aliases
	r.Files = append(r.Files, o.Files...)
	r.Copied = append(r.Copied, o.Copied...)
	r.Left = append(r.Left, o.Left...)
	r.Originals = append(r.Originals, o.Originals...)
	r.Anew = append(r.Anew, o.Anew...)
	r.Ratio = stored.Ratio(r.BytesOut, r.BytesIn)
}
