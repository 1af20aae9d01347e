// Package save writes tensors to files. A save classifies the tensors, lays out the files, encodes on all cores,
// writes, and publishes (package publish). Package convert uses it to write the tensors of other files.
//
// Every file is written under a temporary name in its final folder, synced to the disk, and then renamed. If a save is
// stopped by an error, a full disk, a cancel or a kill, readers find either the old file or the new one. The bytes of a
// file depend only on its tensors, its metadata, the Spec and the plain file that a conversion compresses. They do not
// depend on the number of threads. Only encrypted files also depend on random numbers.
//
// The caller's tensors are read in place; those on a GPU are read chunk by chunk. A save allocates only a window of
// chunks (two or three per thread), 16 MiB for trial encodings of small tensors, and, for tensors that a GPU encodes, a
// pinned ring of less than 0.5 GB, which the next save reuses. A staged save holds all stored bytes in host memory.
package save

import (
	"context"
	"strings"
	"time"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/save/original"
	"github.com/overwire/overwire/gosrc/save/publish"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/stored"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/tensorizer"
	"github.com/zeebo/xxh3"
)

// Write saves tensors. It checks every argument before it touches the target's
// folder. The job's counters show its progress; j may be nil.
func Write(ctx context.Context, j *job.Job, spec Spec, in []Input) (Report, error) {
	start := time.Now()
	target, err := Resolve(spec.Path, &spec)
	if err != nil {
		return Report{}, err
	}
	items := itemsIn(in)
	w := NewWriter(target, &spec, j)
	defer w.gpus.close()
	files, err := w.prepare(ctx, items)
	if err != nil {
		return Report{}, errs.Place("save", target.Path, "", -1, errs.Ended(ctx, err))
	}
	defer func() { w.stage.Free() }()
	w.Plan()
	rep, err := w.Write(ctx, files)
	rep.OnGPU = w.onGPU.Load()
	rep.Seconds = time.Since(start).Seconds()
	rep.HideUsers()
	return rep, errs.Place("save", target.Path, "", -1, errs.Ended(ctx, err))
}

func itemsIn(in []Input) []*Item {
	items := make([]*Item, len(in))
	for i := range in {
		t := &in[i]
		items[i] = &Item{name: t.Name, dtype: t.DType, shape: t.Shape, bytes: int64(len(t.Data)), body: memory(t.Data)}
		switch {
		case t.Device != nil:
			items[i].bytes, items[i].body = t.Device.Bytes, &deviceBody{DeviceMemory: t.Device}
		case len(t.Pieces) > 0:
			body := newScattered(t.Pieces)
			items[i].bytes, items[i].body = body.ends[len(body.ends)-1], body
		}
	}
	return items
}

// A Front is the header of a plain file, without its length prefix, and the order of the
// tensors in the file as indexes of the inputs.
type Front struct {
	Header string `json:"header"`
	Order  []int  `json:"order"`
}

// FrontOf returns the header and the tensor order of a plain file. path is for messages; nothing is written.
func FrontOf(path string, metadata map[string]string, in []Input) (Front, error) {
	items := itemsIn(in)
	number := make(map[*Item]int, len(in))
	for i, t := range items {
		number[t] = i
	}
	if err := checkMetadata(path, metadata); err != nil {
		return Front{}, err
	}
	if err := checkItems(path, items); err != nil {
		return Front{}, err
	}
	order, header, err := layPlain(items, metadata)
	if err != nil {
		return Front{}, err
	}
	front := Front{Header: string(header[8:]), Order: make([]int, len(order))}
	for i, t := range order {
		front.Order[i] = number[t]
	}
	return front, nil
}

// WriteWhole writes a file from bytes in memory. A shard index with the same stem may be next to it.
func WriteWhole(ctx context.Context, path string, b []byte) error {
	spec := Spec{Path: path, Beside: true}
	target, err := Resolve(path, &spec)
	if err != nil {
		return err
	}
	_, err = NewWriter(target, &spec, nil).Write(ctx, []File{{File: publish.File{Path: target.Path,
		Content: publish.WholeFile(b)}}})
	return err
}

// Estimate predicts the compressed size of tensors from samples.
func Estimate(ctx context.Context, uris []string, access format.Access) (sum stored.Total, err error) {
	m, err := stored.OpenNamed(ctx, uris, access, false)
	if err != nil {
		return sum, errs.Ended(ctx, err)
	}
	defer m.Close()
	c := classifier{spec: &Spec{}, threads: knob.Workers(0)}
	if err := c.spec.check(""); err != nil {
		return sum, err
	}
	items := ItemsOf(m, stored.NewCache(c.threads))
	if err := c.classify(ctx, items); err != nil {
		return sum, errs.Ended(ctx, err)
	}
	for _, t := range items {
		bytes := int64(0)
		if t.form != alias {
			bytes = int64(float64(t.bytes) * t.expect)
		}
		sum.Add(t.bytes, bytes)
	}
	return sum, nil
}

// An Input is one tensor to save. Its bytes are in Data, Pieces or Device, in row-major order, and have exactly the
// size of shape and dtype. They must stay valid and unchanged until the job ends.
type Input struct {
	Name   string
	DType  tensor.DType
	Shape  []int64
	Data   []byte
	Pieces [][]byte      // bytes in several pieces of host memory, in order
	Device *DeviceMemory // bytes outside host memory
}

// DeviceMemory is a tensor's memory on a GPU.
type DeviceMemory struct {
	Addr  uintptr // identifies the memory; tensors that share memory have the same Addr
	Bytes int64
	// GPU holds the memory and may encode it. If it is nil, the host encodes.
	GPU *cuda.Device
	// Read fills dst with the bytes at off. It is called in parallel.
	Read func(dst []byte, off int64) error
}

// A Spec describes what to write. Its zero value, with a Path, writes one plain safetensors file with all cores.
type Spec struct {
	// Path is the file to write, e.g. "model.safetensors". A symbolic link is followed. s3:// and redis:// are written
	// without a local file: the object is sent in parts and becomes visible in one step. If there are several files,
	// the index is published last, and then the files of the old model are removed. A path that ends in .tensors gives
	// a tensorizer file, without compression or metadata. Storage.Encrypt is only for such files.
	Path string `json:"path"`
	// Metadata becomes `__metadata__`. The key "overwire" is reserved.
	Metadata map[string]string `json:"metadata,omitempty"`
	// Compress writes the container of docs/format.md instead of a plain safetensors
	// file. The container is lossless, and is still a safetensors file.
	Compress bool `json:"compress,omitempty"`
	// Level chooses between speed and size. "" or "default" uses the codec that decodes at full speed on CPUs and GPUs.
	// "smaller" also tries a codec that only the CPU can decode, slowly, and stores the smaller result of each chunk.
	// It has no effect on tensors in several column parts.
	Level string `json:"level,omitempty"`
	// Digests stores the digest of each tensor in a container (docs/format.md 6). With
	// it, a model in memory can be compared without reading the file's tensors.
	Digests bool `json:"digests,omitempty"`
	// NoSHA256 makes a conversion store no SHA-256 of the original, because only one core can
	// compute it for each file. The original's header and tensor hashes are still checked.
	NoSHA256 bool `json:"no_sha256,omitempty"`
	// Parts divides compressed tensors into 1, 2, 4 or 8 column parts, so a slice of dimension 1 reads only the parts
	// that it needs. A tensor gets fewer parts if its rows cannot be divided evenly, and 1 if it has an alias with rows
	// of a different size. 0 means 1.
	Parts int `json:"parts,omitempty"`
	// Threads is the number of cores to use; 0 means all.
	Threads int `json:"threads,omitempty"`
	// Shard is the maximum number of tensor bytes in one file; 0 means no limit. If the tensors do not fit in one file,
	// the files get an index and are named as on the Hugging Face Hub: model-00001-of-00002.safetensors and
	// model.safetensors.index.json. A larger tensor gets a separate file. If there is an earlier set, the new shards
	// get unused names (modelfiles.Mark), and the index replaces the old one in one step. Then files of an earlier save
	// of the path (shards, single file, index) are removed.
	Shard int64 `json:"shard,omitempty"`
	// ChunkBytes is the size of a chunk: a multiple of 4096, at most 16 MiB. 0 means 1 MiB: a chunk of that size and
	// its compressed form fit in a core's second-level cache.
	ChunkBytes int64 `json:"-"`

	// Like is a local file. New files get its mode, owner and ACL if no file of the
	// model is replaced. If it is "", the umask decides.
	Like string `json:"like,omitempty"`
	// Beside allows writing a single file next to a shard index of the same name. Otherwise that is an error, because
	// readers of the folder would follow the index and still load the old model.
	Beside bool `json:"beside,omitempty"`

	// Storage describes how to reach remote files: the target, and the sources of a conversion.
	Storage format.Access `json:"storage,omitzero"`
	// Staging, if not nil, collects all stored bytes in host memory before files are written.
	Staging *Staging `json:"-"`

	// FS is the file system; nil means the disk. Tests use one that fails.
	FS atomicfile.FS `json:"-"`
}

// Staging lets the tensors change before a save has ended.
type Staging struct {
	// Done, if not nil, is called once, when the tensors may change.
	Done func()
	// MaxMemory is the maximum host memory for stored bytes; 0 means all available memory.
	MaxMemory int64
}

const levelSmaller = "smaller"

// check validates the fields and fills in defaults. path is for messages.
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

// IsBrief reports whether a save takes less time than waking another thread. That is the case if it writes little host
// memory to a single file in an in-memory file system.
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

// badArgument returns an errs.ErrArgument about a target or one of its tensors.
func badArgument(path, name, format string, args ...any) error {
	return errs.Locate("save", path, name, -1, errs.New(errs.ErrArgument, format, args...))
}

// A Report describes what was written. BytesIn counts the logical bytes of tensors, BytesOut the bytes of the weight
// files. Ratio is BytesOut / BytesIn, or 1 if there were no bytes. Copied files are counted separately, because they
// contain no tensors.
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
	Staged      float64  `json:"staged,omitempty"` // seconds until the tensors were allowed to change
	Files       []string `json:"files"`            // files written, in order; an index.json is last
	Copied      []string `json:"copied,omitempty"` // the entries of Files that are auxiliary files of source folders
	// Left lists files of source folders that were not copied: other weights, hidden files, links to other folders,
	// and special files.
	Left []string `json:"left,omitempty"`

	// Originals lists the containers that store the plain file that they were made from,
	// or the plain files that are identical to the ones that were compressed.
	Originals []original.Summary `json:"originals,omitempty"`
	// Anew lists plain files that were made from compressed ones and may differ from the
	// originals: the sources store no original, group tensors differently, or have
	// different metadata.
	Anew []string `json:"anew,omitempty"`
}

// HideUsers removes users and passwords from the URIs of a report, because programs log it.
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

// Add adds the report of a save of other files.
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

// A fileFormat is a format that files can be written in.
type fileFormat struct {
	// extension is the suffix of paths with this format. Paths with other suffixes have the last format in formats.
	extension string
	coded     bool // tensors may be compressed, or be aliases
	// refuse returns which part of a Spec the format does not support, or "".
	refuse func(s *Spec) string
	// settings are storage options that are added when sources are read for this format.
	settings map[string]string
	write    func(ctx context.Context, s *session, to source.Output, share writerShare, file *File) (written, error)
}

// written is the result of writing one file.
type written struct {
	size     int64
	original *original.Summary // nil if there is no original
}

var formats = []fileFormat{
	{
		extension: tensorizer.Extension,
		refuse:    refusedByTensors,
		settings:  map[string]string{tensorizer.OptionBytes: "true"}, // it supports dtypes that other formats lack
		write:     writeTensors,
	},
	{extension: publish.Extension, coded: true, refuse: refusedBySafetensors, write: encodeFile},
}

func refusedBySafetensors(s *Spec) string {
	if len(s.Storage.Encrypt) > 0 {
		return "only .tensors files can be encrypted, not folders or other formats"
	}
	return ""
}

func refusedByTensors(s *Spec) string {
	switch {
	case s.Shard > 0:
		return ".tensors files cannot be sharded"
	case len(s.Metadata) > 0:
		return ".tensors files cannot hold metadata"
	}
	return ""
}

// A Target is the parsed path that a save writes to.
type Target struct {
	Path   string // a local path, or a URI
	Remote bool
	Named  bool // the path has a file extension
	format *fileFormat
}

// At returns the target for another path on the same host or in the same store.
func (t Target) At(path string) Target {
	t.Path, t.format = path, &formats[len(formats)-1]
	for i := range formats {
		if strings.HasSuffix(path, formats[i].extension) {
			t.format = &formats[i]
			break
		}
	}
	t.Named = strings.HasSuffix(path, t.format.extension)
	return t
}

// Coded reports whether tensors in the target's format may be compressed or be aliases.
func (t Target) Coded() bool { return t.format.coded }

// Settings returns storage options to add when sources are read for this target.
func (t Target) Settings() map[string]string { return t.format.settings }

// Resolve checks a path and the parts of a Spec that do not depend on the tensors, and fills in defaults of the Spec.
func Resolve(path string, spec *Spec) (Target, error) {
	switch scheme := source.Scheme(path); {
	case path == "":
		return Target{}, badArgument(path, "", "there is no path to write to")
	case scheme == "file":
		local, err := source.FilePath(path)
		if err != nil {
			return Target{}, err
		}
		path = local
	case open.RecipeOf(scheme) != nil:
		return Target{}, errs.In("save", path, open.RecipeOf(scheme))
	case scheme != "" && !open.Writable(path):
		return Target{}, errs.In("save", path, errs.New(errs.ErrNotSupported,
			"cannot write to %s://: save to s3://, redis:// or a local file", scheme))
	}
	t := Target{Remote: source.Remote(path)}.At(path)
	if err := spec.check(path); err != nil {
		return t, err
	}
	if why := t.format.refuse(spec); why != "" {
		return t, badArgument(path, "", "%s", why)
	}
	return t, checkMetadata(path, spec.Metadata)
}

// writeTensors writes a .tensors file. Tensors from another .tensors file keep their types,
// modules and dtypes. Other tensors are written as those of a state dict.
func writeTensors(ctx context.Context, s *session, to source.Output, _ writerShare, file *File) (written, error) {
	known := map[source.Source]map[string]tensorizer.Item{}
	all := make([]tensorizer.Tensor, len(file.Items))
	for i, t := range file.Items {
		if t.from == nil || t.from.format != tensorizer.Format {
			it, err := tensorizer.NewItem(t.name, t.dtype, t.shape, t.bytes)
			if err != nil {
				return written{}, errs.Locate("save", to.URI(), t.name, -1, err)
			}
			all[i] = tensorizer.Tensor{Item: it, Data: flowOf(s, t)}
			continue
		}
		if known[t.from.src] == nil {
			f, err := tensorizer.Open(ctx, t.from.src, true)
			if err != nil {
				return written{}, err
			}
			known[t.from.src] = f.Items()
		}
		all[i] = tensorizer.Tensor{Item: known[t.from.src][t.name], Data: flowOf(s, t)}
	}
	size, err := tensorizer.Write(ctx, to, tensorizer.How{Path: to.URI(), Encrypt: s.spec.Storage.Encrypt,
		Workers: s.threads, InOrder: source.Remote(file.Path)}, all)
	return written{size: size}, err
}

// flowOf returns a Flow that reads a tensor's bytes and compares them with the source's hash.
func flowOf(s *session, t *Item) tensorizer.Flow {
	var f tensorizer.Flow
	if m, ok := t.body.(memory); ok {
		f.Memory = m
	} else {
		if file, ok := t.body.(fileBody); ok {
			f.Step = file.Block()
		}
		f.Next = func(ctx context.Context, buf []byte, off int64) ([]byte, error) {
			defer addLap(&s.clock.read, time.Now())
			return t.body.bytes(ctx, buf, off)
		}
	}
	f.Busy = &s.clock.hash
	whole := xxh3.New()
	f.Pass = func(p []byte) error {
		if t.known() != nil {
			_, _ = whole.Write(p)
		}
		s.job.Bytes.Add(int64(len(p)))
		return nil
	}
	f.Done = func() error {
		if t.known() != nil && t.bytes > 0 && codec.HashOf(whole.Sum128()) != t.known().Hash {
			return t.errOtherBytes()
		}
		s.job.Tensors.Add(1)
		return nil
	}
	return f
}
