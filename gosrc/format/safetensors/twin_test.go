package safetensors

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

// The twin in this file reads headers with encoding/json, following the safetensors README. It shares no code with
// the parser, and the tests compare the two.

var errTwin = errors.New("the README forbids this file")

// A twinTensor is a tensor as the twin reads it.
type twinTensor struct {
	dtype      string
	shape      []uint64
	begin, end uint64
}

// twin reads a whole file strictly.
func twin(file []byte) (ts map[string]twinTensor, metadata map[string]string, err error) {
	if len(file) < 8 {
		return nil, nil, errTwin
	}
	n := binary.LittleEndian.Uint64(file)
	if n > 100_000_000 || n > uint64(len(file)-8) {
		return nil, nil, errTwin
	}
	text := file[8 : 8+n]
	if !utf8.Valid(text) || bytes.HasPrefix(text, []byte("\xef\xbb\xbf")) || loneSurrogate(text) {
		return nil, nil, errTwin
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	ts = map[string]twinTensor{}
	err = object(d, func(key string) error {
		if key == "__metadata__" {
			if metadata != nil {
				return errTwin
			}
			metadata, err = strings0(d)
			return err
		}
		if _, twice := ts[key]; twice {
			return errTwin
		}
		t, err := entryOf(d)
		ts[key] = t
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	if rest := bytes.TrimLeft(text[d.InputOffset():], " \t\r\n"); len(rest) > 0 {
		return nil, nil, errTwin
	}
	return ts, metadata, covers(ts, uint64(len(file))-8-n)
}

// object reads an object and calls member for each of its keys.
func object(d *json.Decoder, member func(key string) error) error {
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return errTwin
	}
	for d.More() {
		t, err := d.Token()
		key, ok := t.(string)
		if err != nil || !ok {
			return errTwin
		}
		if err := member(key); err != nil {
			return err
		}
	}
	if _, err := d.Token(); err != nil {
		return errTwin
	}
	return nil
}

// strings0 reads metadata: an object of strings, or null for no metadata.
func strings0(d *json.Decoder) (map[string]string, error) {
	var raw json.RawMessage
	if d.Decode(&raw) != nil {
		return nil, errTwin
	}
	if string(raw) == "null" {
		return nil, nil
	}
	in := json.NewDecoder(bytes.NewReader(raw))
	out := map[string]string{}
	err := object(in, func(key string) error {
		t, err := in.Token()
		s, ok := t.(string)
		if _, twice := out[key]; err != nil || !ok || twice {
			return errTwin
		}
		out[key] = s
		return nil
	})
	return out, err
}

func entryOf(d *json.Decoder) (t twinTensor, err error) {
	seen := map[string]bool{}
	err = object(d, func(key string) error {
		if seen[key] {
			return errTwin
		}
		seen[key] = true
		var raw json.RawMessage
		if d.Decode(&raw) != nil {
			return errTwin
		}
		switch key {
		case "dtype":
			if raw[0] != '"' || json.Unmarshal(raw, &t.dtype) != nil {
				return errTwin
			}
		case "shape":
			t.shape, err = numbers(raw)
			return err
		case "data_offsets":
			o, err := numbers(raw)
			if err != nil || len(o) != 2 {
				return errTwin
			}
			t.begin, t.end = o[0], o[1]
		}
		return nil
	})
	if err == nil && !(seen["dtype"] && seen["shape"] && seen["data_offsets"]) {
		err = errTwin
	}
	return t, err
}

// numbers reads an array of whole numbers without a sign, fraction or exponent.
func numbers(raw json.RawMessage) (out []uint64, err error) {
	var all []json.RawMessage
	if raw[0] != '[' || json.Unmarshal(raw, &all) != nil {
		return nil, errTwin
	}
	for _, n := range all {
		v, err := strconv.ParseUint(string(n), 10, 63)
		if err != nil {
			return nil, errTwin
		}
		out = append(out, v)
	}
	return out, nil
}

// covers returns an error unless the tensors have the sizes of their shapes and cover each data byte exactly once.
func covers(ts map[string]twinTensor, size uint64) error {
	end := uint64(0)
	for _, name := range order(ts) {
		t := ts[name]
		d, ok := tensor.ParseDType(t.dtype)
		if !ok || t.begin != end || t.end < t.begin || len(t.shape) > 64 {
			return errTwin
		}
		bits := uint64(1)
		for _, n := range append(slices.Clone(t.shape), uint64(d.Bits())) {
			if n != 0 && bits > math.MaxUint64/n {
				return errTwin
			}
			bits *= n
		}
		if bits%8 != 0 || bits/8 != t.end-t.begin {
			return errTwin
		}
		end = t.end
	}
	if end != size {
		return errTwin
	}
	return nil
}

// order returns the names sorted by offset, those of empty tensors by name.
func order(ts map[string]twinTensor) []string {
	return slices.SortedFunc(maps.Keys(ts), func(a, b string) int {
		return cmp.Or(cmp.Compare(ts[a].begin, ts[b].begin), cmp.Compare(ts[a].end, ts[b].end), strings.Compare(a, b))
	})
}

// loneSurrogate detects lone surrogates, which encoding/json replaces but safetensors refuses.
func loneSurrogate(text []byte) bool {
	for i := 0; i+5 < len(text); i++ {
		if text[i] != '\\' {
			continue
		}
		if text[i+1] != 'u' {
			i++
			continue
		}
		at := func(k int) uint64 {
			if k+6 > len(text) || text[k] != '\\' || text[k+1] != 'u' {
				return 0
			}
			v, _ := strconv.ParseUint(string(text[k+2:k+6]), 16, 32)
			return v
		}
		switch v := at(i); {
		case v >= 0xdc00 && v < 0xe000:
			return true
		case v >= 0xd800 && v < 0xdc00:
			if low := at(i + 6); low < 0xdc00 || low >= 0xe000 {
				return true
			}
			i += 6
		}
		i += 5
	}
	return false
}

// A scribe writes valid headers in unusual style: with spaces anywhere, needless escapes, members in any order, and
// unknown fields.
type scribe struct{ r *rand.Rand }

func (s scribe) space() string { return []string{"", "", "", " ", "\n", "\t \r"}[s.r.IntN(6)] }

func (s scribe) text(v string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, c := range v {
		switch {
		case s.r.IntN(6) == 0 && c < 0x10000:
			fmt.Fprintf(&b, []string{`\u%04x`, `\u%04X`}[s.r.IntN(2)], c)
		case s.r.IntN(6) == 0 && c >= 0x10000:
			fmt.Fprintf(&b, `\u%04x\u%04X`, 0xd800+(c-0x10000)>>10, 0xdc00+(c-0x10000)&0x3ff)
		case c == '/' && s.r.IntN(2) == 0:
			b.WriteString(`\/`)
		default:
			q := AppendString(nil, string(c))
			b.Write(q[1 : len(q)-1])
		}
	}
	b.WriteByte('"')
	return b.String()
}

// list joins members, in random order if shuffle is true.
func (s scribe) list(begin, end string, members []string, shuffle bool) string {
	if shuffle {
		s.r.Shuffle(len(members), func(i, j int) { members[i], members[j] = members[j], members[i] })
	}
	for i := range members {
		members[i] = s.space() + members[i] + s.space()
	}
	return begin + strings.Join(members, ",") + s.space() + end
}

func (s scribe) member(key, value string) string {
	return s.text(key) + s.space() + ":" + s.space() + value
}

var alphabet = []string{"a", "layers.0.w", "é", "模", "\U0001f9ee", "\"", "\\", "\n", "/", "\x01", " ", "dtype",
	"__metadata__x", ""}

func (s scribe) name(i int) string {
	return alphabet[s.r.IntN(len(alphabet))] + strconv.Itoa(i) + alphabet[s.r.IntN(len(alphabet))]
}

// file writes tensors of random dtypes and shapes.
func (s scribe) file() []byte {
	var members []string
	at := uint64(0)
	for i := range s.r.IntN(6) {
		d := tensor.DType(1 + s.r.IntN(tensor.NumDTypes))
		var shape []int64
		var dims []string
		for range s.r.IntN(4) {
			n := int64(s.r.IntN(5))
			shape, dims = append(shape, n), append(dims, strconv.FormatInt(n, 10))
		}
		n, err := tensor.Size(d, shape)
		if err != nil {
			d = tensor.U8
			n, _ = tensor.Size(d, shape)
		}
		fields := []string{s.member("dtype", s.text(d.String())), s.member("shape", s.list("[", "]", dims, false)),
			s.member("data_offsets", s.list("[", "]", []string{strconv.FormatUint(at, 10),
				strconv.FormatUint(at+uint64(n), 10)}, false))}
		if s.r.IntN(4) == 0 {
			fields = append(fields, s.member("more", []string{"null", "-1.5e+3", `{"dtype":[]}`, `[true,false,"x"]`,
				`"\ud83e\uddee"`}[s.r.IntN(5)]))
		}
		members = append(members, s.member(s.name(i), s.list("{", "}", fields, true)))
		at += uint64(n)
	}
	if s.r.IntN(2) == 0 {
		meta := "null"
		if s.r.IntN(4) > 0 {
			var entries []string
			for i := range s.r.IntN(4) {
				entries = append(entries, s.member(s.name(i), s.text(alphabet[s.r.IntN(len(alphabet))])))
			}
			meta = s.list("{", "}", entries, true)
		}
		members = append(members, s.member("__metadata__", meta))
	}
	text := s.space() + s.list("{", "}", members, true) + s.space()
	out := binary.LittleEndian.AppendUint64(nil, uint64(len(text)))
	return append(append(out, text...), make([]byte, at)...)
}

const marks = `{}[]:,"\0123456789-+.eEu nt`

// hurt makes random changes to the header of a file. They may make the file invalid.
func (s scribe) hurt(file []byte) []byte {
	b := bytes.Clone(file)
	n := int(binary.LittleEndian.Uint64(b))
	for range 1 + s.r.IntN(2) {
		if n = min(n, len(b)-8); n <= 0 {
			break
		}
		at := 8 + s.r.IntN(n)
		switch s.r.IntN(7) {
		case 0:
			b[at] = marks[s.r.IntN(len(marks))]
		case 1:
			b[at] ^= 1 << s.r.IntN(8)
		case 2: // copy a part to another position
			from := 8 + s.r.IntN(n)
			copy(b[at:8+n], b[from:min(8+n, from+1+s.r.IntN(12))])
		case 3: // change a digit
			if i := bytes.IndexAny(b[at:8+n], "0123456789"); i >= 0 {
				b[at+i] = byte('0' + s.r.IntN(10))
			}
		case 4:
			b = append(b[:at:at], append([]byte([]string{"0", "1", ",", " ", "{}", `"`, `\ud800`, "null"}[s.r.IntN(8)]),
				b[at:]...)...)
			n++
		case 5:
			b = append(b, make([]byte, s.r.IntN(3))...)
		default:
			b = slices.Delete(b, at, min(at+1+s.r.IntN(3), 8+n))
		}
	}
	if s.r.IntN(4) > 0 { // correct the length
		if i := bytes.LastIndexByte(b, '}'); i >= 8 {
			binary.LittleEndian.PutUint64(b, uint64(i+1-8))
		}
	}
	return b
}

// The parser reads the same tensors as the twin, in the same order, and refuses the same files, for valid headers of
// every style and for damaged ones.
func TestParserAgainstTheTwin(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	s := scribe{rand.New(rand.NewPCG(seed, 0))}
	read, refused := 0, 0
	compare := func(file []byte, good bool) {
		t.Helper()
		ts, metadata, forbidden := twin(file)
		h, err := Read(t.Context(), inMemory(file), Options{})
		if good && forbidden != nil {
			t.Fatalf("the twin refuses the valid file %q", file)
		}
		if (err == nil) != (forbidden == nil) {
			t.Fatalf("%q: got %v, but the twin returns %v", file, err, forbidden)
		}
		if err != nil {
			refused++
			if !errs.Classed(err) {
				t.Fatalf("%q: an error without a class: %v", file, err)
			}
			return
		}
		read++
		names := order(ts)
		if len(h.Tensors) != len(names) || !maps.Equal(h.Metadata, metadata) ||
			(h.Metadata == nil) != (metadata == nil) {
			t.Fatalf("%q: got %+v, but the twin returns %v %v", file, h, names, metadata)
		}
		for i, x := range h.Tensors {
			w := ts[names[i]]
			if x.Name != names[i] || x.DType.String() != w.dtype || uint64(x.Off-h.Data) != w.begin ||
				uint64(x.Bytes) != w.end-w.begin ||
				!slices.EqualFunc(x.Shape, w.shape, func(a int64, b uint64) bool { return uint64(a) == b }) {
				t.Fatalf("%q: got %+v, but the twin returns %q %+v", file, x, names[i], w)
			}
		}
		if loose, err := Read(t.Context(), inMemory(file), Options{Lenient: true}); err != nil ||
			len(loose.Tensors) != len(h.Tensors) {
			t.Fatalf("%q: lenient mode reads less: %v", file, err)
		}
	}
	for range 1500 {
		file := s.file()
		compare(file, true)
		for range 12 {
			compare(s.hurt(file), false)
		}
	}
	for _, v := range vectors() { // the twin may accept files that we refuse, but not the reverse
		_, _, forbidden := twin(v.file)
		if v.class == nil && forbidden != nil {
			t.Errorf("%s: the twin returns %v for a valid file", v.name, forbidden)
		}
	}
	t.Logf("%d read, %d refused", read, refused)
	if read < 1500 || refused < 3000 {
		t.Errorf("only %d files were read and %d refused", read, refused)
	}
}

// encoding/json reads the written index.json files correctly. They read back unchanged, and writing them again gives
// the same bytes. Only keeps the files of the given names and every tensor in them.
func TestIndexTwin(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	s := scribe{rand.New(rand.NewPCG(seed, 1))}
	for range 400 {
		want := Shards{TotalSize: s.r.Int64N(1<<50) - 1, Metadata: map[string]string{}}
		for i := range 1 + s.r.IntN(4) {
			want.Files = append(want.Files, fmt.Sprintf("m%d-é of %d.safetensors", i, s.r.IntN(9)))
		}
		files := map[string]string{}
		for i := range len(want.Files) + s.r.IntN(9) {
			at := min(i, len(want.Files)-1)
			if i >= len(want.Files) {
				at = s.r.IntN(len(want.Files))
			}
			name := s.name(i)
			want.Weights = append(want.Weights, Weight{name, at})
			files[name] = want.Files[at]
		}
		if s.r.IntN(2) == 0 {
			want.Metadata["more"] = []string{`{"a":[1,null]}`, `"x"`, "-1.5"}[s.r.IntN(3)]
		}
		text := AppendIndexJSON(nil, want)
		var found struct {
			Metadata map[string]json.RawMessage `json:"metadata"`
			Map      map[string]string          `json:"weight_map"`
		}
		if err := json.Unmarshal(text, &found); err != nil || !maps.Equal(found.Map, files) {
			t.Fatalf("%s: %v", text, err)
		}
		if size, said := found.Metadata["total_size"]; said != (want.TotalSize >= 0) ||
			said && string(size) != strconv.FormatInt(want.TotalSize, 10) {
			t.Fatalf("%s: want total_size %d", text, want.TotalSize)
		}
		got, err := ReadIndexJSON("m.index.json", text)
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		slices.SortFunc(want.Weights, func(a, b Weight) int { return strings.Compare(a.Name, b.Name) })
		if !slices.Equal(got.Files, want.Files) || !slices.Equal(got.Weights, want.Weights) ||
			got.TotalSize != want.TotalSize || !maps.Equal(got.Metadata, want.Metadata) {
			t.Fatalf("%s: %+v, want %+v", text, got, want)
		}
		if again := AppendIndexJSON(nil, got); !bytes.Equal(again, text) {
			t.Fatalf("written back: %s, want %s", again, text)
		}
		w := got.Weights[s.r.IntN(len(got.Weights))]
		few := got.Only([]string{w.Name, w.Name})
		if len(few.Files) != 1 || few.Files[0] != got.Files[w.File] ||
			slices.ContainsFunc(few.Weights, func(o Weight) bool {
				return files[o.Name] != few.Files[0]
			}) ||
			len(few.Weights) != len(slices.DeleteFunc(slices.Clone(got.Weights), func(o Weight) bool {
				return o.File != w.File
			})) {
			t.Fatalf("only %q: %+v of %+v", w.Name, few, got)
		}
		if all := got.Only([]string{w.Name, "there is none"}); len(all.Files) != len(got.Files) {
			t.Fatalf("a missing name: %+v", all)
		}
	}
}
