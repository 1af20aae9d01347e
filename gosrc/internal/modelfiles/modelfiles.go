// Package modelfiles parses the names of weights: single files, shards, variants, and the index.json of shards.
//
// model.safetensors a single file model-00001-of-00004.safetensors a shard model.safetensors.index.json the index of
// shards model.fp16.safetensors a variant, for the base names in withVariants model.fp16-00001-of-00004.safetensors a
// shard of a variant model-00001-of-00004.fp16.safetensors the same in another spelling
// model.safetensors.index.fp16.json the index of a variant model-ow0123abcd-00001-of-00004.safetensors a shard of a
// save over an earlier set
package modelfiles

import (
	"crypto/rand"
	"encoding/hex"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

const (
	// Extension is the suffix of weights files.
	Extension = ".safetensors"
	// IndexSuffix is the suffix of indexes, after the name of the file that is divided into shards.
	IndexSuffix = ".index.json"
)

// withVariants are the base names for which libraries write variants (fp16), which are separate models. In
// other names, a dot is part of the base name.
var withVariants = []string{"model", "diffusion_pytorch_model"}

// A Name is the parsed name of a weights file or an index.
type Name struct {
	Stem       string
	Variant    string // "" means the default variant
	Number, Of int    // number of a shard and number of shards; 0 for a single file
	Marked     bool   // see Mark
	Index      bool
}

var (
	indexName = newMatcher(".index", `^(.+)\.safetensors(?:\.([^.]+))?\.index(?:\.([^.]+))?\.json$`)
	shardName = newMatcher("-of-", `^(.*)-(\d{1,9})-of-(\d{1,9})(?:\.([^.]+))?$`)
	partName  = newMatcher("shard-", `^shard-\d{1,9}-model-\d{1,9}-of-\d{1,9}\.safetensors$`)
)

// newMatcher returns a function that returns the groups of a pattern in a name, or nil. It compiles the pattern for the
// first name with the given part, so that loads of single files do not wait for it.
func newMatcher(part, pattern string) func(name string) []string {
	regex := sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(pattern) })
	return func(name string) []string {
		if !strings.Contains(name, part) {
			return nil
		}
		return regex().FindStringSubmatch(name)
	}
}

// ParseName parses a name. ok is false for other files and for hidden files.
func ParseName(name string) (n Name, ok bool) {
	if strings.HasPrefix(name, ".") {
		return n, false
	}
	if m := indexName(name); m != nil {
		n = stemOf(m[1])
		n.Index = true
		if n.Variant == "" {
			n.Variant = m[2] + m[3]
		}
		return n, true
	}
	base, ok := strings.CutSuffix(name, Extension)
	if !ok {
		return n, false
	}
	if m := shardName(base); m != nil {
		shard := stemOf(m[1])
		shard.Number, _ = strconv.Atoi(m[2])
		shard.Of, _ = strconv.Atoi(m[3])
		if m[4] != "" && shard.Variant == "" {
			shard.Variant = m[4]
		}
		if shard.Of > 0 && (m[4] == "" || slices.Contains(withVariants, shard.Stem)) {
			return shard, true
		}
	}
	return stemOf(base), true
}

// IsPart reports whether a file contains parts of tensors, according to its name. torch's
// HuggingFaceStorageWriter writes such files as shard-RANK-model-FILE-of-FILES.safetensors.
func IsPart(name string) bool { return partName(name) != nil }

// stemOf removes the mark and the variant from a base name.
func stemOf(base string) (n Name) {
	n.Stem, n.Marked = cutMark(base)
	for _, stem := range withVariants {
		if variant, ok := strings.CutPrefix(n.Stem, stem+"."); ok && variant != "" {
			n.Stem, n.Variant = stem, variant
		}
	}
	return n
}

// Mark returns a new mark. A save over an earlier set adds a mark to the names of its files, so that they
// differ from the old names and both sets are complete until the index is replaced. A marked file that no index
// lists belongs to no model.
func Mark() string {
	var r [4]byte
	_, _ = rand.Read(r[:]) // cannot fail
	return "-ow" + hex.EncodeToString(r[:])
}

// WithMark returns the name with the given mark, or without a mark if it is "".
func WithMark(name, mark string) string {
	stem, rest, ok := divideName(name)
	if !ok {
		return name
	}
	return stem + mark + rest
}

// Family returns what the names of one model's files have in common: the name without mark, number and
// extension. The family of a variant is the same in both spellings.
func Family(name string) string {
	stem, rest, ok := divideName(name)
	if !ok {
		return name
	}
	if n, _ := ParseName(stem + Extension); n.Variant == "" {
		if n, _ = ParseName(stem + rest); n.Variant != "" {
			return stem + "." + n.Variant
		}
	}
	return stem
}

// divideName splits the name of a weights file at its mark.
func divideName(name string) (stem, rest string, ok bool) {
	n, ok := ParseName(name)
	if !ok || n.Index {
		return name, "", false
	}
	base := strings.TrimSuffix(name, Extension)
	stem = base
	if m := shardName(base); m != nil && n.Of > 0 {
		stem = m[1]
	}
	rest = name[len(stem):]
	stem, _ = cutMark(stem)
	return stem, rest, true
}

// cutMark removes the mark from a base name.
func cutMark(base string) (stem string, ok bool) {
	at := strings.LastIndex(base, "-ow")
	if at < 0 || len(base) != at+len("-ow01234567") || strings.Trim(base[at+len("-ow"):], "0123456789abcdef") != "" {
		return base, false
	}
	return base[:at], true
}

// A Kind is a format of files or folders that users have instead of safetensors weights, or that another library reads.
type Kind struct {
	// Magics are the possible bytes of such a file at Offset. nil means that only its name is compared.
	Magics []string
	Offset int
	// Names are globs. A file's name must match one of them. In a folder, each of them must match a name. nil
	// matches any name.
	Names []string
	// What describes the file ("a GGUF file"), and Do what to do with it.
	What, Do string
	// Foreign means that a folder with weights in another format may also contain such a file.
	Foreign bool
}

func (k *Kind) String() string { return k.What + ": " + k.Do }

// HeadBytes is how much of a file KindOf examines.
const HeadBytes = 512

const (
	withTheirs = "load it with the library that wrote it, and save its tensors with overwire.save_file"
	convert    = "`overwire convert` (overwire.convert) reads "
	engine     = "its weights cannot be extracted: convert the model that it was built from"
	local      = "`overwire convert FOLDER -o OUT` (overwire.convert) and overwire.load_file read local ones: " +
		"fetch the folder"
	onnx = "overwire.save_file({t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(FILE).graph.initializer}, OUT)"
	hdf5 = "d = {}; h5py.File(FILE).visititems(lambda n, o: d.update({n: o[()]}) if isinstance(o, h5py.Dataset) " +
		"else None); overwire.save_file(d, OUT)"
	msgpack = "overwire.save_file(flax.traverse_util.flatten_dict(flax.serialization.msgpack_restore(open(FILE, 'rb')" +
		".read()), sep='.'), OUT)"
	paddle   = "safetensors.paddle.save_file(paddle.load(FILE), OUT)"
	openvino = "overwire.save_file({c.friendly_name: c.data for c in openvino.Core().read_model(XML).get_ops() if " +
		"c.get_type_name() == 'Constant'}, OUT)"
	orbax = "tree = orbax.checkpoint.PyTreeCheckpointer().restore(FOLDER); overwire.save_file({" +
		"jax.tree_util.keystr(p, simple=True, separator='.'): numpy.asarray(x) for p, x in " +
		"jax.tree_util.tree_leaves_with_path(tree)}, OUT)"
	tensorflow = "r = tensorflow.train.load_checkpoint(PREFIX); overwire.save_file({n: r.get_tensor(n) for n in " +
		"r.get_variable_to_shape_map()}, OUT)"
	keras = "unzip model.weights.h5 from it, and then: " + hdf5
	// oldTorch is the magic number at the start of torch.save files before torch 1.6, as a pickle.
	oldTorch = "\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
	// oldFrame is oldTorch within a frame, which pickles have from protocol 4 on.
	oldFrame = "\x95\r\x00\x00\x00\x00\x00\x00\x00" + oldTorch
)

// kinds are tested in this order. The commands here and in folders were run with the libraries that they name,
// except those for DeepSpeed, Megatron-LM and TensorFlow, which follow their documentation.
var kinds = []Kind{
	{Magics: []string{"PK\x03\x04"}, Names: []string{"*.keras"}, What: "a Keras archive", Do: keras},
	{Magics: []string{"PK\x03\x04"}, Names: []string{"*.npz"}, What: "a numpy archive", Do: convert + "local ones"},
	{Magics: []string{"PK\x03\x04"}, What: "a zip archive, as written by torch.save and numpy.savez",
		Do: convert + "torch.save files (.pt, .pth, .bin, .ckpt) and .npz files; load others with the library that " +
			"wrote them"},
	{Magics: []string{"ustar"}, Offset: 257,
		What: "a tar archive, as written by NeMo, and by torch.save before torch 0.2",
		Do:   convert + ".nemo files; unpack others with tar -xf"},
	{Names: []string{"*.pdparams", "*.pdopt"}, What: "a PaddlePaddle file", Do: paddle},
	{Names: []string{"*.msgpack"}, What: "a Flax file (msgpack)", Do: msgpack},
	{Names: []string{"*.onnx"}, What: "an ONNX model", Do: onnx},
	{Names: []string{"openvino_*.bin", "openvino_*.xml"}, What: "an OpenVINO model", Do: openvino, Foreign: true},
	{Magics: []string{"ftrt"}, What: "a TensorRT engine", Do: engine},
	{Names: []string{"*.engine", "*.plan", "*.trt"}, What: "a TensorRT engine", Do: engine},
	{Magics: []string{"Transformer", "Whisper", "Wav2Vec2"}, Offset: 6, What: "a CTranslate2 model",
		Do: "its weights have CTranslate2's own layout: convert the model that it was made from"},
	{Names: []string{"*.distcp"}, What: "a part of a torch.distributed.checkpoint", Do: convert + "its whole folder"},
	{Magics: []string{"\x80\x02" + oldTorch, "\x80\x03" + oldTorch, "\x80\x04" + oldFrame, "\x80\x05" + oldFrame,
		"L119547037146038801333356L\n."}, What: "a torch.save file from before torch 1.6",
		Do: "`torch.save(torch.load(f), f)` makes a newer one, which overwire.convert reads"},
	{Magics: []string{"\x80\x02", "\x80\x03", "\x80\x04", "\x80\x05"}, What: "a pickle", Do: withTheirs},
	{Magics: []string{"GGUF"}, What: "a GGUF file", Do: "overwire lists and verifies GGUF files, but does not " +
		"load or compress them, because compression would save only 5 to 13 %: keep the file unchanged", Foreign: true},
	{Magics: []string{"lmgg", "fmgg", "tjgg", "algg"}, What: "a GGML file from before GGUF",
		Do: "keep the file unchanged, or convert the model that it was made from", Foreign: true},
	{Magics: []string{"\x93NUMPY"}, What: "a .npy file", Do: convert + "local ones", Foreign: true},
	{Magics: []string{"\x89HDF"}, What: "an HDF5 file, as written by Keras", Do: hdf5, Foreign: true},
	{Magics: []string{"TFL3"}, Offset: 4, What: "a TensorFlow Lite model", Do: engine},
	{Magics: []string{"ET"}, Offset: 4, Names: []string{"*.pte"}, What: "an ExecuTorch program", Do: engine},
	{Magics: []string{"\x1f\x8b"}, What: "a gzip file", Do: "decompress it with gunzip first"},
	{Magics: []string{"version "}, What: "a Git LFS pointer", Do: "get the file itself with git lfs pull"},
	{Magics: []string{"<!DOCTYP", "<!doctyp", "<html"}, What: "a web page", Do: "check the URL of the download"},
	{Magics: []string{"{"}, What: "JSON", Do: "name the .safetensors file; an index of shards must be named " +
		"*.index.json, and overwire inspect TRACE.json --html PAGE.html shows a trace"},
}

// folders are tested in this order.
var folders = []Kind{
	{What: "a torch.distributed.checkpoint (FSDP, torchtitan, Megatron-core)", Names: []string{"*.distcp"}, Do: local},
	{What: "a torch.distributed.checkpoint whose .distcp files are missing", Names: []string{".metadata"},
		Do: "fetch the whole folder again"},
	{What: "shards of torch's HuggingFaceStorageWriter, which hold parts of tensors",
		Names: []string{"shard-*-model-*-of-*.safetensors"}, Do: local},
	{What: "an Orbax checkpoint (JAX, Flax, MaxText)", Names: []string{"_CHECKPOINT_METADATA"}, Do: orbax},
	{What: "an Orbax checkpoint (JAX, Flax, MaxText)", Names: []string{"_METADATA"}, Do: orbax},
	{What: "an OCDBT store of TensorStore, as written by Orbax", Names: []string{"manifest.ocdbt"}, Do: orbax},
	{What: "a DeepSpeed ZeRO checkpoint", Names: []string{"zero_to_fp32.py"},
		Do: "`python FOLDER/zero_to_fp32.py FOLDER OUT --safe_serialization`"},
	{What: "a DeepSpeed ZeRO checkpoint", Names: []string{"*zero_pp_rank_*"},
		Do: "in the folder above: `python zero_to_fp32.py . OUT --safe_serialization`"},
	{What: "a Megatron-LM checkpoint with a part for each rank", Names: []string{"mp_rank_00"},
		Do: "Megatron-LM's tools/checkpoint/convert.py makes a torch_dist one, which overwire reads"},
	{What: "a TensorFlow SavedModel", Names: []string{"saved_model.pb"},
		Do: "PREFIX is FOLDER/variables/variables: " + tensorflow},
	{What: "a TensorFlow checkpoint", Names: []string{"*.data-*-of-*", "*.index"}, Do: tensorflow},
	{What: "a TensorRT-LLM engine", Names: []string{"rank*.engine"}, Do: engine},
	{What: "an OpenVINO model", Names: []string{"openvino_*.xml"}, Do: openvino},
	{What: "an ONNX model", Names: []string{"*.onnx"}, Do: onnx},
	{What: "a Flax model", Names: []string{"*.msgpack"}, Do: msgpack},
	{What: "a PaddlePaddle model", Names: []string{"*.pdparams"}, Do: paddle},
	{What: "a Keras model", Names: []string{"*.keras"}, Do: keras},
	{What: "an HDF5 file, as written by Keras", Names: []string{"*.h5"}, Do: hdf5},
	{What: "a Core ML package", Names: []string{"Manifest.json", "Data"}, Do: engine},
	{What: "a NeMo file", Names: []string{"*.nemo"}, Do: convert + "it: name the file"},
	{What: "a numpy archive", Names: []string{"*.npz"}, Do: convert + "it: name the file"},
	{What: "a GGUF file", Names: []string{"*.gguf"},
		Do: "name the file to list or verify it; overwire does not load or compress GGUF files"},
}

// ListKinds returns the kinds of files.
func ListKinds() []Kind { return kinds }

// KindOf returns the kind of the file with this name or URI, or nil if it is unknown. head is the beginning of
// the file: HeadBytes, or all of a shorter file.
func KindOf(name string, head []byte) *Kind {
	return find(kinds, func(k *Kind) bool {
		isNamed := func(glob string) bool { return matches(glob, name) }
		return (k.Magics == nil || k.hasMagic(head)) && (k.Names == nil || slices.ContainsFunc(k.Names, isNamed))
	})
}

// KindOfFolder returns the kind of a folder that contains these names, or nil.
func KindOfFolder(names []string) *Kind {
	return find(folders, func(k *Kind) bool {
		isAbsent := func(glob string) bool {
			return !slices.ContainsFunc(names, func(name string) bool { return matches(glob, name) })
		}
		return !slices.ContainsFunc(k.Names, isAbsent)
	})
}

func find(table []Kind, isIt func(*Kind) bool) *Kind {
	for i := range table {
		if isIt(&table[i]) {
			return &table[i]
		}
	}
	return nil
}

func (k *Kind) hasMagic(head []byte) bool {
	head = head[min(k.Offset, len(head)):min(len(head), HeadBytes)]
	return slices.ContainsFunc(k.Magics, func(magic string) bool { return strings.HasPrefix(string(head), magic) })
}

func matches(glob, name string) bool {
	ok, _ := path.Match(glob, path.Base(name)) // the patterns are valid
	return ok
}

// Unknown is what to do with a file of an unknown format.
const Unknown = withTheirs
