package modelfiles

import (
	"strings"
	"testing"
)

// Files of other programs are identified by their names and first bytes, and the text explains how to convert them.
// Unknown files are not identified.
func TestKinds(t *testing.T) {
	tar := "./model_config.yaml" + strings.Repeat("\x00", 257-19) + "ustar  \x00"
	for _, c := range []struct{ name, head, want, do string }{
		{"k.h5", "\x89HDF\r\n\x1a\n", "HDF5", "h5py.File"},
		{"k.keras", "PK\x03\x04\x14", "Keras", "model.weights.h5"},
		{"m.npz", "PK\x03\x04\x14", "numpy archive", "overwire convert"},
		{"m.zip", "PK\x03\x04\x14", "zip archive", ".npz"},
		{"s3://b/m.nemo", tar, "tar archive", "tar -xf"},
		{"m.onnx", "\x08\x0e:]\n\x11\n\x01x", "ONNX", "onnx.numpy_helper"},
		{"flax_model.msgpack", "\x82\xa1a\x81\xa1w\xc7\x17", "Flax", "msgpack_restore"},
		{"m.pdparams", "\x80\x04\x95-\x01\x00", "PaddlePaddle", "safetensors.paddle"},
		{"m.pkl", "\x80\x04\x95-\x01\x00", "pickle", "overwire.save_file"},
		{"openvino_model.bin", "\x00\x00\x80?\x00\x00\x80?", "OpenVINO", "openvino.Core"},
		{"model.bin", "\x06\x00\x00\x00\x10\x00TransformerSpec\x00", "CTranslate2", "made from"},
		{"rank0.engine", "ftrt\x00\x00", "TensorRT", "built from"},
		{"m.tflite", "\x1c\x00\x00\x00TFL3", "TensorFlow Lite", "built from"},
		{"__0_0.distcp", "PK\x00\x00", "torch.distributed.checkpoint", "whole folder"},
		{"m.gguf", "GGUF\x03", "GGUF", "verifies"},
		{"m.bin", "lmgg\x01", "GGML", "made from"},
		{"m.npy", "\x93NUMPY\x01\x00", ".npy", "overwire convert"},
	} {
		if got := KindOf(c.name, []byte(c.head)); got == nil || !strings.Contains(got.What, c.want) ||
			!strings.Contains(got.Do, c.do) {
			t.Errorf("%s: %v", c.name, got)
		}
	}
	for _, head := range []string{"", "P", "ustar", strings.Repeat("x", 300)} {
		if got := KindOf("model.bin", []byte(head)); got != nil {
			t.Errorf("%q: %v", head, got)
		}
	}
}

// Folders are identified by the names in them.
func TestKindsOfFolders(t *testing.T) {
	for names, want := range map[string]string{
		".metadata __0_0.distcp common.pt":                  "Megatron-core",
		".metadata":                                         "missing",
		"shard-00001-model-00001-of-00001.safetensors":      "HuggingFaceStorageWriter",
		"_METADATA _CHECKPOINT_METADATA manifest.ocdbt d":   "Orbax",
		"manifest.ocdbt d":                                  "OCDBT",
		"latest zero_to_fp32.py global_step5":               "zero_to_fp32.py FOLDER OUT --safe_serialization",
		"bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt":    "DeepSpeed",
		"saved_model.pb variables":                          "SavedModel",
		"model.ckpt.index model.ckpt.data-00000-of-00001":   "TensorFlow checkpoint",
		"config.json rank0.engine":                          "TensorRT-LLM",
		"openvino_model.xml openvino_model.bin config.json": "OpenVINO",
		"config.json flax_model.msgpack":                    "Flax",
		"model.pdparams":                                    "PaddlePaddle",
		"Manifest.json Data":                                "Core ML",
		"model.nemo":                                        "NeMo",
		"s3://b/f/model.onnx":                               "ONNX",
		"config.json tokenizer.json":                        "",
		"":                                                  "",
	} {
		if got := KindOfFolder(strings.Fields(names)); (got == nil) != (want == "") ||
			got != nil && !strings.Contains(got.String(), want) {
			t.Errorf("%s: %v", names, got)
		}
	}
}
