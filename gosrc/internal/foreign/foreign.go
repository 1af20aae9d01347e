// Package foreign says what files and folders of other programs are, by their names and
// first bytes, and how their tensors become safetensors files. It has the one table of them.
package foreign

import (
	"path"
	"slices"
	"strings"
)

// A kind of file, or of folder.
type kind struct {
	what string
	do   string
	// Of a file: the bytes at an offset, and globs of which its name matches one; without
	// either, the other decides.
	magic string
	at    int
	names []string
	// Of a folder: globs, each of which some name in it matches.
	folder []string
}

const (
	save    = "load it with the library that wrote it, and save its tensors with overwire.save_file"
	convert = "`overwire convert` (overwire.convert) reads "
	engine  = "its weights cannot be taken out: convert the model that it was built from"
	local   = "`overwire convert FOLDER -o OUT` (overwire.convert) and overwire.load_file read local ones: " +
		"fetch the folder"
	onnx = "overwire.save_file({t.name: onnx.numpy_helper.to_array(t) for t in " +
		"onnx.load(FILE).graph.initializer}, OUT)"
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
)

// kinds are looked for in this order. Each command in them was run with the library that it names.
var kinds = []kind{
	{what: "a Keras archive", names: []string{"*.keras"}, magic: "PK\x03\x04",
		do: "unzip model.weights.h5 from it, and then: " + hdf5},
	{what: "a numpy archive", names: []string{"*.npz"}, magic: "PK\x03\x04", do: convert + "local ones"},
	{what: "a zip archive, as torch.save and numpy.savez write", magic: "PK\x03\x04",
		do: convert + "those of torch.save (.pt, .pth, .bin, .ckpt) and .npz files; load others with what wrote them"},
	{what: "a tar archive, as NeMo's .nemo files are", magic: "ustar", at: 257,
		do: convert + ".nemo files; unpack others by tar -xf"},
	{what: "a PaddlePaddle file", names: []string{"*.pdparams", "*.pdopt"}, do: paddle},
	{what: "a Flax file (msgpack)", names: []string{"*.msgpack"}, do: msgpack},
	{what: "an ONNX model", names: []string{"*.onnx"}, do: onnx},
	{what: "an OpenVINO model", names: []string{"openvino_*.bin", "openvino_*.xml"}, do: openvino},
	{what: "a TensorRT engine", magic: "ftrt", do: engine},
	{what: "a TensorRT engine", names: []string{"*.engine", "*.plan", "*.trt"}, do: engine},
	{what: "a CTranslate2 model", magic: "Spec\x00", at: -1,
		do: "its weights are of CTranslate2's own layout: convert the model that it was made from"},
	{what: "a part of a torch.distributed.checkpoint", names: []string{"*.distcp"}, do: convert + "its whole folder"},
	{what: "a pickle", magic: "\x80\x02", do: save}, {what: "a pickle", magic: "\x80\x03", do: save},
	{what: "a pickle", magic: "\x80\x04", do: save}, {what: "a pickle", magic: "\x80\x05", do: save},
	{what: "a GGUF file", magic: "GGUF", do: "overwire lists and verifies GGUF files and reads no tensors of them, " +
		"since coding would take off 5 to 13 % of their quantised blocks: keep it as it is"},
	{what: "a GGML file of before GGUF", magic: "lmgg", do: "convert the model that it was made from"},
	{what: "a .npy file", magic: "\x93NUMPY", do: convert + "local ones"},
	{what: "an HDF5 file, as Keras writes", magic: "\x89HDF", do: hdf5},
	{what: "a TensorFlow Lite model", magic: "TFL3", at: 4, do: engine},
	{what: "an ExecuTorch program", magic: "ET", at: 4, do: engine, names: []string{"*.pte"}},
	{what: "a gzip file", magic: "\x1f\x8b", do: "gunzip it first"},
	{what: "a Git LFS pointer", magic: "version ", do: "get the file itself by git lfs pull"},
	{what: "a web page", magic: "<!DOCTYP", do: "check the URL that it came from"},
	{what: "a web page", magic: "<html", do: "check the URL that it came from"},
	{what: "JSON", magic: "{", do: "name the .safetensors file; an index of shards must be called *.index.json, " +
		"and a trace is shown by overwire inspect TRACE.json --html PAGE.html"},

	{what: "a torch.distributed.checkpoint (FSDP, torchtitan, Megatron-core)", folder: []string{"*.distcp"},
		do: local},
	{what: "a torch.distributed.checkpoint whose .distcp files are missing", folder: []string{".metadata"},
		do: "fetch the whole folder again"},
	{what: "shards of torch's HuggingFaceStorageWriter, which hold parts of tensors",
		folder: []string{"shard-*-model-*-of-*.safetensors"},
		do:     local},
	{what: "an Orbax checkpoint (JAX, Flax, MaxText)", folder: []string{"_CHECKPOINT_METADATA"}, do: orbax},
	{what: "an Orbax checkpoint (JAX, Flax, MaxText)", folder: []string{"_METADATA"}, do: orbax},
	{what: "an OCDBT store of TensorStore, as Orbax writes", folder: []string{"manifest.ocdbt"}, do: orbax},
	{what: "a DeepSpeed ZeRO checkpoint", folder: []string{"zero_to_fp32.py"},
		do: "`python FOLDER/zero_to_fp32.py FOLDER OUT --safe_serialization`"},
	{what: "a DeepSpeed ZeRO checkpoint", folder: []string{"*zero_pp_rank_*"},
		do: "in the folder above: `python zero_to_fp32.py . OUT --safe_serialization`"},
	{what: "a Megatron-LM checkpoint in parts of ranks", folder: []string{"mp_rank_00"},
		do: "Megatron-LM's tools/checkpoint/convert.py makes a torch_dist one, which overwire reads"},
	{what: "a TensorFlow SavedModel", folder: []string{"saved_model.pb"},
		do: "PREFIX is its variables/variables: " + tensorflow},
	{what: "a TensorFlow checkpoint", folder: []string{"*.data-*-of-*", "*.index"}, do: tensorflow},
	{what: "a TensorRT-LLM engine", folder: []string{"rank*.engine"}, do: engine},
	{what: "an OpenVINO model", folder: []string{"openvino_*.xml"}, do: openvino},
	{what: "an ONNX model", folder: []string{"*.onnx"}, do: onnx},
	{what: "a Flax model", folder: []string{"*.msgpack"}, do: msgpack},
	{what: "a PaddlePaddle model", folder: []string{"*.pdparams"}, do: paddle},
	{what: "a Keras model", folder: []string{"*.keras"}, do: "unzip model.weights.h5 from it, and then: " + hdf5},
	{what: "an HDF5 file, as Keras writes", folder: []string{"*.h5"}, do: hdf5},
	{what: "a Core ML package", folder: []string{"Manifest.json", "Data"}, do: engine},
	{what: "a NeMo file", folder: []string{"*.nemo"}, do: convert + "it: name the file"},
	{what: "a numpy archive", folder: []string{"*.npz"}, do: convert + "it: name the file"},
	{what: "a GGUF file", folder: []string{"*.gguf"},
		do: "overwire lists and verifies it by its name, and keeps it as it is"},
}

// DescribeFile says what a file is, and what to do with it, as `a pickle: load it ...`; "": not known.
// head is its first bytes.
func DescribeFile(name string, head []byte) string {
	name = path.Base(name)
	for _, k := range kinds {
		if k.folder != nil || k.magic != "" && !k.hasMagic(head) ||
			k.names != nil && !slices.ContainsFunc(k.names, func(glob string) bool { return matches(glob, name) }) {
			continue
		}
		return k.what + ": " + k.do
	}
	return ""
}

func (k *kind) hasMagic(head []byte) bool {
	if k.at < 0 { // a text whose length stands before it
		return strings.Contains(string(head[:min(len(head), 64)]), k.magic)
	}
	return k.at <= len(head) && strings.HasPrefix(string(head[k.at:]), k.magic)
}

// DescribeFolder is DescribeFile for a folder with files and folders of these names.
func DescribeFolder(names []string) string {
	for _, k := range kinds {
		if k.folder == nil {
			continue
		}
		hasAll := true
		for _, glob := range k.folder {
			hasAll = hasAll && slices.ContainsFunc(names, func(name string) bool {
				return matches(glob, path.Base(name))
			})
		}
		if hasAll {
			return k.what + ": " + k.do
		}
	}
	return ""
}

func matches(glob, name string) bool {
	ok, _ := path.Match(glob, name) // the patterns are ours
	return ok
}
