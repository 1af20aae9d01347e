package safetensors

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

var update = flag.Bool("update", false, "write the vectors that the Python tests read")

const vectorFile = "../../../tests/goldens/container/vectors.json"

// A vector is a file and the expected result. accept is the result of the safetensors library, which
// tests/peers/test_safetensors_parity.py checks.
type vector struct {
	name   string
	file   []byte
	accept bool   // whether safetensors 0.8 reads the file
	class  error  // our error class, or nil if we read the file
	words  string // expected rule of our error, part of its text, or "RULE: text"
	loose  bool   // whether lenient mode reads the file
}

const (
	one  = `"dtype":"U8","shape":[4],"data_offsets":[0,4]`
	data = "abcd"
)

func reads(name, header, data string) vector {
	return vector{name: name, file: file(header, data), accept: true, loose: true}
}

func refuses(name, header, data, words string) vector {
	return vector{name: name, file: file(header, data), class: errs.ErrFormat, words: words}
}

// stricter returns a vector for a file that only the safetensors library reads.
func stricter(name, header, data, words string, loose bool) vector {
	return vector{name: name, file: file(header, data), accept: true, class: errs.ErrFormat, words: words, loose: loose}
}

func (v vector) lenient() vector          { v.loose = true; return v }
func (v vector) is(class error) vector    { v.class = class; return v }
func raw(name string, b []byte) vector    { return vector{name: name, file: b, class: errs.ErrFormat} }
func (v vector) saying(w string) vector   { v.words = w; return v }
func with(format string, a ...any) string { return fmt.Sprintf(format, a...) }
func shape(dims string, end int) string {
	return with(`{"a":{"dtype":"U8","shape":[%s],"data_offsets":[0,%d]}}`, dims, end)
}
func field(value string) string { return with(`{"a":{%s,"x":%s}}`, one, value) }

// vectors covers every rule of the format at least once.
func vectors() []vector {
	json := "InvalidHeaderDeserialization"
	a := `{"a":{` + one + `}}`
	vs := []vector{
		// The frame.
		raw("no bytes", nil).saying("HeaderTooSmall"),
		raw("7 bytes", make([]byte, 7)).saying("HeaderTooSmall"),
		raw("8 bytes, N = 0", make([]byte, 8)).saying(json),
		raw("N over the limit", append([]byte{1, 0xe1, 0xf5, 5, 0, 0, 0, 0}, "{}"...)).saying("HeaderTooLarge"),
		raw("N at the limit, file short", append([]byte{0, 0xe1, 0xf5, 5, 0, 0, 0, 0}, "{}"...)).saying("InvalidHeaderLength").is(errs.ErrCorrupt),
		raw("N = 2^64-1", []byte("\xff\xff\xff\xff\xff\xff\xff\xff{}")).saying("HeaderTooLarge"),
		raw("N one over the file", append([]byte{3, 0, 0, 0, 0, 0, 0, 0}, "{}"...)).saying("InvalidHeaderLength").is(errs.ErrCorrupt),
		raw("N over the file, no JSON", append([]byte{9, 0, 0, 0, 0, 0, 0, 0}, "xy"...)).saying("InvalidHeaderLength"),
		raw("a zip", []byte("PK\x03\x04aaaaaaaaaaaaaa")).saying("torch.save"),
		refuses("bytes after the data", a, data+"x", "MetadataIncompleteBuffer: 1 bytes after").lenient(),
		refuses("data cut short", a, data[:3], "MetadataIncompleteBuffer: truncated").is(errs.ErrCorrupt),
		refuses("no data", a, "", "MetadataIncompleteBuffer: truncated").is(errs.ErrCorrupt),
		reads("one tensor", a, data),
		reads("no tensor", `{}`, ""),
		reads("metadata only", `{"__metadata__":{"a":"b"}}`, ""),

		// Whitespace, and characters that JSON does not count as whitespace.
		reads("leading space", " \n\t\r"+a, data),
		reads("trailing space", a+" \n\t\r", data),
		reads("space everywhere", ` { "a" : { "dtype" : "U8" , "shape" : [ 2 , 2 ] , "data_offsets" : [ 0 , 4 ] } } `, data),
		refuses("trailing NUL", a+"\x00", data, json),
		refuses("leading NUL", "\x00"+a, data, json),
		refuses("trailing letter", a+"x", data, json),
		refuses("two objects", a+"{}", data, json),
		refuses("byte order mark", "\ufeff"+a, data, json),
		refuses("form feed", "\f"+a, data, json),
		refuses("an array", `[]`, "", json),
		refuses("null", `null`, "", json),
		refuses("only space", `    `, "", json),
		refuses("no end", a[:len(a)-1], data, json),
		refuses("trailing comma", `{"a":{`+one+`},}`, data, "trailing comma"),
		refuses("leading comma", `{,"a":{`+one+`}}`, data, json),
		refuses("no colon", `{"a"{`+one+`}}`, data, json),
		refuses("a comment", `{"a":{`+one+`}/**/}`, data, json),
		refuses("single quotes", `{'a':{`+one+`}}`, data, json),

		// Text.
		refuses("not UTF-8", "{\"\xff\":{"+one+"}}", data, "InvalidHeader: not UTF-8"),
		refuses("overlong UTF-8", "{\"\xc0\x80\":{"+one+"}}", data, "InvalidHeader: not UTF-8"),
		refuses("a surrogate in UTF-8", "{\"\xed\xa0\x80\":{"+one+"}}", data, "InvalidHeader: not UTF-8"),
		refuses("a raw control character", "{\"a\n\":{"+one+"}}", data, "control character"),
		reads("a raw DEL", "{\"a\x7f\":{"+one+"}}", data),
		reads("every escape", `{"\"\\\/\b\f\n\r\té\u00E9":{`+one+`}}`, data),
		refuses("an unknown escape", `{"\x":{`+one+`}}`, data, "bad escape"),
		refuses("a short escape", `{"\u12":{`+one+`}}`, data, json),
		refuses("a signed escape", `{"\u+123":{`+one+`}}`, data, json),
		reads("a surrogate pair", `{"\ud83d\ude00":{`+one+`}}`, data),
		refuses("a lone high surrogate", `{"\ud83d":{`+one+`}}`, data, "lone surrogate"),
		refuses("a lone low surrogate", `{"\ude00":{`+one+`}}`, data, "lone surrogate"),
		refuses("half a pair", `{"\ud83d\u0041":{`+one+`}}`, data, "lone surrogate"),
		refuses("a string without end", `{"a`, "", json),
		refuses("a string that ends in a backslash", `{"a\`, "", json),
		reads("NUL in a name", `{"\u0000":{`+one+`}}`, data),
		reads("the empty name", `{"":{`+one+`}}`, data),

		// Names and keys.
		stricter("a name twice", `{"a":{`+one+`},"a":{`+one+`}}`, data, "two tensors have this name", true),
		stricter("a name twice, once escaped", `{"a":{`+one+`},"\u0061":{`+one+`}}`, data, "two tensors have this name", true),
		refuses("a field twice", `{"a":{`+one+`,"dtype":"U8"}}`, data, "duplicate field `dtype`").lenient(),
		refuses("metadata twice", `{"__metadata__":{"a":"b"},"__metadata__":{"a":"b"}}`, "", "duplicate field `__metadata__`").lenient(),
		stricter("a metadata key twice", `{"__metadata__":{"a":"b","a":"c"}}`, "", "duplicate metadata key", true),
		stricter("an ignored field twice", `{"a":{`+one+`,"x":1,"x":2}}`, data, "duplicate key", true),
		stricter("a key twice in an ignored value", field(`{"p":1,"q":0,"p":2}`), data, "duplicate key", true),

		// Metadata.
		reads("metadata last", `{"a":{`+one+`},"__metadata__":{"a":"b"}}`, data),
		reads("metadata empty", `{"__metadata__":{}}`, ""),
		reads("metadata null", `{"__metadata__":null}`, ""),
		reads("metadata key escaped", `{"\u005f_metadata__":{"a":"b"}}`, ""),
		refuses("metadata with a number", `{"__metadata__":{"a":1}}`, "", "is not a string").lenient(),
		refuses("metadata with null", `{"__metadata__":{"a":null}}`, "", "is not a string").lenient(),
		refuses("metadata with an object", `{"__metadata__":{"a":{"b":"c"}}}`, "", "is not a string").lenient(),
		refuses("metadata a list", `{"__metadata__":[]}`, "", json).lenient(),
		refuses("metadata a string", `{"__metadata__":"x"}`, "", json).lenient(),
		refuses("metadata half null", `{"__metadata__":nul}`, "", json),
		refuses("a tensor named __metadata__", `{"__metadata__":{`+one+`}}`, data, "is not a string").lenient(),

		// Entries.
		refuses("an entry null", `{"a":null}`, "", json),
		refuses("an entry a string", `{"a":"x"}`, "", json),
		refuses("an entry empty", `{"a":{}}`, "", "missing field `dtype`"),
		refuses("no dtype", `{"a":{"shape":[4],"data_offsets":[0,4]}}`, data, "missing field `dtype`"),
		refuses("no shape", `{"a":{"dtype":"U8","data_offsets":[0,4]}}`, data, "missing field `shape`"),
		refuses("no offsets", `{"a":{"dtype":"U8","shape":[4]}}`, data, "missing field `data_offsets`"),
		stricter("an entry as an array", `{"a":["U8",[4],[0,4]]}`, data, json, false),
		stricter("a dtype as an object", `{"a":{"dtype":{"U8":null},"shape":[4],"data_offsets":[0,4]}}`, data, json, false),
		reads("fields in another order", `{"a":{"data_offsets":[0,4],"shape":[4],"dtype":"U8"}}`, data),
		reads("a field name escaped", `{"a":{"\u0064type":"U8","shape":[4],"data_offsets":[0,4]}}`, data),
		reads("a dtype escaped", `{"a":{"dtype":"\u00558","shape":[4],"data_offsets":[0,4]}}`, data),
		refuses("an unknown dtype", `{"a":{"dtype":"U9","shape":[4],"data_offsets":[0,4]}}`, data, "unknown dtype"),
		refuses("a dtype in lower case", `{"a":{"dtype":"u8","shape":[4],"data_offsets":[0,4]}}`, data, "unknown dtype"),
		refuses("a dtype null", `{"a":{"dtype":null,"shape":[4],"data_offsets":[0,4]}}`, data, json),

		// Ignored fields, which must still be valid JSON.
		reads("an unknown field", field(`1`), data),
		reads("unknown values", field(`[{"y":[1.5e3,null,true,false,"z\n",-0,-1,0e0,{},[]]}]`), data),
		reads("a long number", field(`123456789012345678901234567890`), data),
		reads("a tiny number", field(`1e-400`), data),
		refuses("a number out of range", field(`1e309`), data, "out of range"),
		refuses("a long number out of range", field(strings.Repeat("9", 310)), data, "out of range"),
		refuses("NaN", field(`NaN`), data, json),
		refuses("Infinity", field(`-Infinity`), data, json),
		refuses("a leading zero", field(`01`), data, json),
		refuses("a leading zero after a sign", field(`-01`), data, json),
		refuses("a leading point", field(`.5`), data, json),
		refuses("a trailing point", field(`1.`), data, json),
		refuses("an empty exponent", field(`1e`), data, json),
		refuses("only a sign", field(`-`), data, json),
		refuses("hexadecimal", field(`0x1`), data, json),
		refuses("truex", field(`truex`), data, json),
		refuses("a list with a trailing comma", field(`[1,]`), data, json),
		refuses("an object with a trailing comma", field(`{"a":1,}`), data, json),
		refuses("a key that is a number", field(`{1:2}`), data, json),
		refuses("a bad string in an ignored value", field(`"\ud800"`), data, json),
		reads("nested to the limit", field(strings.Repeat("[", 125)+"1"+strings.Repeat("]", 125)), data),
		refuses("nested too deeply", field(strings.Repeat("[", 126)+"1"+strings.Repeat("]", 126)), data, "nested too deeply"),
		refuses("objects nested too deeply", field(strings.Repeat(`{"a":`, 126)+"1"+strings.Repeat("}", 126)), data, "nested too deeply"),
		refuses("nested without end", field(strings.Repeat("[", 100_000)), data, "nested too deeply"),

		// Numbers.
		refuses("a float", shape("4.0", 4), data, "not a float"),
		refuses("an exponent", shape("4e0", 4), data, "not a float"),
		refuses("negative dimensions", shape("-2,-2", 4), data, "unsigned"),
		refuses("minus zero", shape("-0", 0), "", "unsigned"),
		refuses("a leading zero in a shape", shape("04", 4), data, "leading zero"),
		refuses("a plus sign", shape("+4", 4), data, "unsigned"),
		refuses("true", shape("true,4", 4), data, "unsigned"),
		refuses("a string in a shape", shape(`"4"`, 4), data, "unsigned"),
		refuses("nested shape", shape(`[4]`, 4), data, "unsigned"),
		refuses("shape with a trailing comma", shape(`4,`, 4), data, "trailing comma"),
		refuses("shape null", `{"a":{"dtype":"U8","shape":null,"data_offsets":[0,4]}}`, data, json),
		refuses("shape a number", `{"a":{"dtype":"U8","shape":4,"data_offsets":[0,4]}}`, data, json),
		refuses("2^70 x 0", shape("1180591620717411303424,0", 0), "", "ValidationOverflow"),
		stricter("2^63 x 0", shape("9223372036854775808,0", 0), "", "ValidationOverflow", false),
		reads("2^62 x 0", shape("4611686018427387904,0", 0), ""),
		reads("0 x 2^62 x 2^62", shape("0,4611686018427387904,4611686018427387904", 0), ""),
		refuses("2^62 x 4 x 0", shape("4611686018427387904,4,0", 0), "", "ValidationOverflow"),
		refuses("2^62 x 4", shape("4611686018427387904,4", 0), "", "ValidationOverflow"),
		refuses("2^61 bytes", shape("2305843009213693952", 0), "", "ValidationOverflow"),
		refuses("2^61 - 1 bytes", shape("2305843009213693951", 0), "", "TensorInvalidInfo"),
		refuses("2^64 as an offset", `{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,18446744073709551616]}}`, data, "InvalidOffset"),
		refuses("2^64-1 as an offset", `{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,18446744073709551615]}}`, data, "InvalidOffset"),
		refuses("2^62 as an offset", `{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4611686018427387904]}}`, data, "TensorInvalidInfo"),
		refuses("an offset that is a float", `{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4.0]}}`, data, "not a float"),
		refuses("three offsets", `{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4,4]}}`, data, json),
		refuses("one offset", `{"a":{"dtype":"U8","shape":[4],"data_offsets":[0]}}`, data, json),
		refuses("no offsets in the list", `{"a":{"dtype":"U8","shape":[0],"data_offsets":[]}}`, "", json),

		// Shapes, sizes, offsets.
		reads("rank 0", `{"a":{"dtype":"U32","shape":[],"data_offsets":[0,4]}}`, data),
		reads("a dimension of 0", `{"a":{"dtype":"U32","shape":[0,5],"data_offsets":[0,0]}}`, ""),
		reads("rank 64", shape(strings.TrimSuffix(strings.Repeat("1,", 64), ","), 1), "a"),
		stricter("rank 65", shape(strings.TrimSuffix(strings.Repeat("1,", 65), ","), 1), "a", "rank", false),
		refuses("fewer bytes than the shape", `{"a":{"dtype":"U16","shape":[4],"data_offsets":[0,4]}}`, data, "TensorInvalidInfo"),
		refuses("more bytes than the shape", `{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,4]}}`, data, "TensorInvalidInfo"),
		refuses("bytes for a dimension of 0", `{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,4]}}`, data, "TensorInvalidInfo"),
		refuses("end before begin", `{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}`, data, "InvalidOffset"),
		refuses("end before begin, from 0", `{"z":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}`, data, "InvalidOffset"),
		refuses("not from 0", `{"a":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}}`, data, "InvalidOffset"),
		refuses("a hole", `{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}`, data, "InvalidOffset"),
		refuses("an overlap", `{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}`, data, "InvalidOffset"),
		refuses("the same bytes twice", `{"a":{`+one+`},"b":{`+one+`}}`, data, "InvalidOffset"),
		refuses("nothing inside a tensor", `{"a":{`+one+`},"b":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}}`, data, "InvalidOffset"),
		reads("nothing after a tensor", `{"a":{`+one+`},"b":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}}`, data),
		reads("nothing before a tensor", `{"a":{`+one+`},"b":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}`, data),
		reads("not in order", `{"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`, data),
		reads("F4", `{"a":{"dtype":"F4","shape":[8],"data_offsets":[0,4]}}`, data),
		refuses("F4 inside a byte", `{"a":{"dtype":"F4","shape":[7],"data_offsets":[0,4]}}`, data, "MisalignedSlice"),
		reads("F6", `{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}`, data[:3]),
		refuses("F6 inside a byte", `{"a":{"dtype":"F6_E3M2","shape":[5],"data_offsets":[0,4]}}`, data, "MisalignedSlice"),
	}
	for _, d := range []struct {
		name  string
		bytes int
	}{
		{"BOOL", 8}, {"F4", 4}, {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8}, {"I8", 8}, {"F8_E5M2", 8}, {"F8_E4M3", 8},
		{"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16}, {"U16", 16}, {"F16", 16}, {"BF16", 16},
		{"I32", 32}, {"U32", 32}, {"F32", 32}, {"C64", 64}, {"F64", 64}, {"I64", 64}, {"U64", 64},
	} {
		vs = append(vs, reads("dtype "+d.name, with(`{"a":{"dtype":%q,"shape":[2,4],"data_offsets":[0,%d]}}`, d.name, d.bytes),
			strings.Repeat("x", d.bytes)))
	}
	return vs
}

// Every rule of the format is enforced. Errors have the expected class, the safetensors library's rule, and the
// file's name.
func TestVectors(t *testing.T) {
	for _, v := range vectors() {
		_, err := Read(context.Background(), inMemory(v.file), Options{})
		switch {
		case v.class == nil && err != nil:
			t.Errorf("%s: refused: %v", v.name, err)
		case v.class != nil && (!errors.Is(err, v.class) || !isSaying(err, v.words)):
			t.Errorf("%s: got %v, want %v saying %q", v.name, err, v.class, v.words)
		case v.class != nil:
			var at *errs.At
			if !errors.As(err, &at) || at.Source != "model.safetensors" || at.Verb != "index" {
				t.Errorf("%s: an error without a location: %v", v.name, err)
			}
		}
		_, err = Read(context.Background(), inMemory(v.file), Options{Lenient: true})
		if (err == nil) != v.loose {
			t.Errorf("%s: lenient mode returns %v", v.name, err)
		}
	}
}

// isSaying reports whether words are an error's rule, a part of its text, or "RULE: part of its text".
func isSaying(err error, words string) bool {
	rule, text, both := strings.Cut(words, ": ")
	if !both {
		return errs.RuleOf(err) == words || strings.Contains(err.Error(), words)
	}
	return errs.RuleOf(err) == rule && strings.Contains(err.Error(), text) || strings.Contains(err.Error(), words)
}

// The file of vectors that the Python tests check against the safetensors library is up to date.
func TestVectorFile(t *testing.T) {
	type row struct {
		Name      string `json:"name"`
		File      string `json:"file"` // base64
		Reference bool   `json:"reference"`
		Ours      string `json:"ours"`    // error class, or "" if overwire reads the file
		Lenient   bool   `json:"lenient"` // whether lenient mode reads it
	}
	var rows []row
	for _, v := range vectors() {
		r := row{v.name, base64.StdEncoding.EncodeToString(v.file), v.accept, "", v.loose}
		if v.class != nil {
			r.Ours = errs.Class(v.class)
		}
		if len(v.file) < 4096 { // larger files are only tested here
			rows = append(rows, r)
		}
	}
	want, err := json.MarshalIndent(rows, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	want = append(want, '\n')
	if *update {
		if err := os.WriteFile(vectorFile, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(vectorFile)
	if err != nil || string(got) != string(want) {
		t.Errorf("%s differs (%v): run go test -update", vectorFile, err)
	}
}
