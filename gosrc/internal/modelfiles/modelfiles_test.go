package modelfiles

import "testing"

// Names are parsed in the forms in which libraries write them. WithMark and Family do not change the rest of a name.
func TestNames(t *testing.T) {
	for name, want := range map[string]Name{
		"model.safetensors":                                   {Stem: "model"},
		"model-00002-of-00004.safetensors":                    {Stem: "model", Number: 2, Of: 4},
		"model-00001-of-000163.safetensors":                   {Stem: "model", Number: 1, Of: 163},
		"model.fp16.safetensors":                              {Stem: "model", Variant: "fp16"},
		"model.fp16-00002-of-00004.safetensors":               {Stem: "model", Variant: "fp16", Number: 2, Of: 4},
		"model-00002-of-00004.fp16.safetensors":               {Stem: "model", Variant: "fp16", Number: 2, Of: 4},
		"model.safetensors.index.json":                        {Stem: "model", Index: true},
		"model.safetensors.index.fp16.json":                   {Stem: "model", Variant: "fp16", Index: true},
		"diffusion_pytorch_model.safetensors.fp16.index.json": {Stem: "diffusion_pytorch_model", Variant: "fp16", Index: true},
		"model-ow0123abcd-00002-of-00004.safetensors":         {Stem: "model", Number: 2, Of: 4, Marked: true},
		"a-ow0123abcd.safetensors":                            {Stem: "a", Marked: true},
		"a-ow0123abcg.safetensors":                            {Stem: "a-ow0123abcg"},
		"a-ow0123abcde.safetensors":                           {Stem: "a-ow0123abcde"},
		"my.model.safetensors":                                {Stem: "my.model"},
		"a-1-of-0.safetensors":                                {Stem: "a-1-of-0"},
		"a-1-of-2.v.safetensors":                              {Stem: "a-1-of-2.v"},
		"consolidated-00001-of-00002.safetensors":             {Stem: "consolidated", Number: 1, Of: 2},
	} {
		if got, ok := ParseName(name); !ok || got != want {
			t.Errorf("%s: %+v, %v, want %+v", name, got, ok, want)
		}
	}
	for _, name := range []string{".model.safetensors", "model.bin", "model_index.json", "index.json", "model.safetensors.json", ""} {
		if got, ok := ParseName(name); ok {
			t.Errorf("%s: %+v", name, got)
		}
	}
	for name, want := range map[string][2]string{
		"model.safetensors":                           {"model-ow00000000.safetensors", "model"},
		"model-00002-of-00004.safetensors":            {"model-ow00000000-00002-of-00004.safetensors", "model"},
		"model-ow0123abcd-00002-of-00004.safetensors": {"model-ow00000000-00002-of-00004.safetensors", "model"},
		"model-00002-of-00004.fp16.safetensors":       {"model-ow00000000-00002-of-00004.fp16.safetensors", "model.fp16"},
		"model.fp16-00002-of-00004.safetensors":       {"model.fp16-ow00000000-00002-of-00004.safetensors", "model.fp16"},
		"a-1-of-2.v.safetensors":                      {"a-1-of-2.v-ow00000000.safetensors", "a-1-of-2.v"},
		"model.fp16.safetensors":                      {"model.fp16-ow00000000.safetensors", "model.fp16"},
		"config.json":                                 {"config.json", "config.json"},
	} {
		if got := [2]string{WithMark(name, "-ow00000000"), Family(name)}; got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
		if marked, _ := ParseName(WithMark(name, Mark())); name != "config.json" && !marked.Marked {
			t.Errorf("%s: %+v", name, marked)
		}
	}
	if !IsPart("shard-00002-model-00001-of-00003.safetensors") || IsPart("model-00001-of-00003.safetensors") {
		t.Error("IsPart is wrong")
	}
	if WithMark("model-ow0123abcd.safetensors", "") != "model.safetensors" {
		t.Error("WithMark did not remove the mark")
	}
}
