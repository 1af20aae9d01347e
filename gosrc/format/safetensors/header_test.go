package safetensors

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// sortEntries sorts entries like other writers: by descending dtype, then by name.
func sortEntries(entries []Entry) {
	slices.SortFunc(entries, func(a, b Entry) int {
		return cmp.Or(cmp.Compare(b.DType, a.DType), strings.Compare(a.Name, b.Name))
	})
}

// model returns the entries of a mixture-of-experts model with n small tensors, and their total size.
func model(n int) ([]Entry, int64) {
	entries := make([]Entry, n)
	for i := range entries {
		entries[i] = Entry{Name: fmt.Sprintf("model.layers.%d.mlp.experts.%d.gate_proj.weight", i/256, i%256),
			DType: tensor.U8, Shape: []int64{1, 2}}
	}
	sortEntries(entries)
	size, err := Place(entries)
	if err != nil {
		panic(err)
	}
	return entries, size
}

func parse(t testing.TB, head []byte, size int64) Header {
	t.Helper()
	h, err := Parse("x", head, size, Options{})
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// Parse reads back the headers that AppendHeader writes, with random names, shapes and dtypes.
func TestRoundTrip(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	letters := []rune("ab.\"\\/\b\f\n\r\t\x00\x1f\x7fé\u2028😀{}[]:, ")
	text := func() string {
		var b strings.Builder
		for range r.IntN(12) {
			b.WriteRune(letters[r.IntN(len(letters))])
		}
		return b.String()
	}
	for round := range 300 {
		seen := map[string]bool{MetadataKey: true}
		var entries []Entry
		for range r.IntN(20) {
			e := Entry{Name: text(), DType: tensor.DType(1 + r.IntN(tensor.NumDTypes)), Shape: []int64{}}
			for range r.IntN(5) {
				e.Shape = append(e.Shape, int64(r.IntN(5)))
			}
			if _, err := tensor.Size(e.DType, e.Shape); err == nil && !seen[e.Name] {
				seen[e.Name] = true
				entries = append(entries, e)
			}
		}
		var metadata map[string]string
		for range r.IntN(4) {
			if metadata == nil {
				metadata = map[string]string{}
			}
			metadata[text()] = text()
		}
		if round%2 == 0 {
			sortEntries(entries)
		}
		size, err := Place(entries)
		if err != nil {
			t.Fatal(err)
		}
		padTo := []int{0, 8, 512, 4096}[r.IntN(4)]
		head, err := AppendHeader([]byte("before"), metadata, entries, padTo)
		if err != nil {
			t.Fatal(err)
		}
		again, _ := AppendHeader([]byte("before"), maps.Clone(metadata), entries, padTo)
		if string(again) != string(head) {
			t.Fatal("two headers of one input differ")
		}
		if bound := HeaderBound(metadata, entries, size); int64(len(strings.TrimRight(string(head[6:]), " "))) > bound {
			t.Fatalf("header of %d bytes over its bound %d", len(head)-6, bound)
		}
		head = head[6:]
		if len(head)%max(8, padTo) != 0 {
			t.Fatalf("header of %d bytes, padded to %d", len(head), padTo)
		}
		h := parse(t, head, int64(len(head))+size)
		if !maps.Equal(h.Metadata, metadata) || h.Data != int64(len(head)) {
			t.Fatalf("metadata %v, data at %d", h.Metadata, h.Data)
		}
		same(t, h, entries)
	}
}

// same compares tensors by name, because empty tensors may be in a different order.
func same(t testing.TB, h Header, entries []Entry) {
	t.Helper()
	if len(h.Tensors) != len(entries) {
		t.Fatalf("got %d tensors, want %d", len(h.Tensors), len(entries))
	}
	byName := map[string]Entry{}
	for _, e := range entries {
		byName[e.Name] = e
	}
	for _, got := range h.Tensors {
		e := byName[got.Name]
		want := tensor.Tensor{Name: e.Name, DType: e.DType, Shape: e.Shape, Off: h.Data + e.Begin,
			Bytes:  e.End - e.Begin,
			Stored: e.End - e.Begin, Alias: -1, Plain: true}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("got %+v\nwant %+v", got, want)
		}
	}
}

// Tensors are sorted by offset, independent of the order in the JSON. Empty ones are sorted by name.
func TestOrderOfBytes(t *testing.T) {
	head := file(`{"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]},"z":{"dtype":"U8","shape":[0],"data_offsets":[2,2]},`+
		`"c":{"dtype":"U8","shape":[0],"data_offsets":[2,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`, "")
	h := parse(t, head, int64(len(head))+4)
	var got []string
	for _, t := range h.Tensors {
		got = append(got, t.Name)
	}
	if strings.Join(got, "") != "aczb" {
		t.Errorf("got the order %v, want a c z b", got)
	}
}

// A header takes one read if it fits into HeadBytes, otherwise two. Ahead contains the data that was read with it.
func TestReads(t *testing.T) {
	for _, n := range []int{0, 1, 100, 2000, 5000} {
		entries, size := model(n)
		head, err := AppendHeader(nil, nil, entries, 0)
		if err != nil {
			t.Fatal(err)
		}
		src := inMemory(append(head, make([]byte, size)...))
		h, err := Read(context.Background(), src, Options{})
		if err != nil {
			t.Fatal(err)
		}
		want := 1
		if len(head) > source.HeadBytes {
			want = 2
		}
		if src.reads != want || src.bytes > max(source.HeadBytes, int64(len(head))) {
			t.Errorf("%d tensors: %d reads of %d bytes", n, src.reads, src.bytes)
		}
		if got := int64(len(h.Ahead)); want == 1 && got != min(source.HeadBytes, int64(len(src.b)))-int64(len(head)) {
			t.Errorf("%d tensors: %d bytes ahead", n, got)
		}
		same(t, h, entries)
	}
}

// I/O errors and cancellation keep their class and get a location. A file that claims to be larger than it is causes
// no large allocation.
func TestReadFails(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Read(ctx, inMemory(file("{}", "")), Options{}); !errors.Is(err, errs.ErrCancelled) {
		t.Errorf("Read with a cancelled context: %v", err)
	}
	big := &memory{b: file(strings.Repeat(" ", 100), ""), size: 1 << 40}
	big.b[3] = 5 // a header of 80 MiB in a shorter file
	if _, err := Read(context.Background(), big, Options{}); !errors.Is(err, errs.ErrCorrupt) {
		t.Errorf("truncated source: %v", err)
	}
}

// The writer refuses headers that the reader would refuse.
func TestWriterRefuses(t *testing.T) {
	ok := Entry{"a", tensor.U8, []int64{4}, 0, 4}
	for name, entries := range map[string][]Entry{
		"reserved":    {{MetadataKey, tensor.U8, []int64{4}, 0, 4}},
		"not UTF-8":   {{"\xff", tensor.U8, []int64{4}, 0, 4}},
		"twice":       {ok, {"a", tensor.U8, []int64{4}, 4, 8}},
		"hole":        {ok, {"b", tensor.U8, []int64{4}, 5, 9}},
		"overlap":     {ok, {"b", tensor.U8, []int64{4}, 3, 7}},
		"backwards":   {{"a", tensor.U8, []int64{4}, 0, -4}},
		"wrong size":  {{"a", tensor.U16, []int64{4}, 0, 4}},
		"negative":    {{"a", tensor.U8, []int64{-4}, 0, 4}},
		"overflow":    {{"a", tensor.U8, []int64{1 << 62, 4}, 0, 0}},
		"half a byte": {{"a", tensor.F4, []int64{3}, 0, 1}},
		"no dtype":    {{"a", tensor.Invalid, []int64{4}, 0, 4}},
		"rank":        {{"a", tensor.U8, make([]int64, 65), 0, 0}},
	} {
		if out, err := AppendHeader([]byte("x"), nil, entries, 0); !errors.Is(err, errs.ErrArgument) ||
			string(out) != "x" {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := AppendHeader(nil, map[string]string{"a": "\xff"}, nil, 0); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("metadata that is not UTF-8: %v", err)
	}
	if _, err := AppendHeader(make([]byte, 0, tensor.MaxHeader+64),
		map[string]string{"a": strings.Repeat("x", tensor.MaxHeader)}, nil, 0); !errors.Is(err, errs.ErrArgument) ||
		errs.RuleOf(err) != "HeaderTooLarge" {
		t.Errorf("a header over the limit: %v", err)
	}
	if _, err := Place([]Entry{{"a", tensor.U8, []int64{1 << 60}, 0, 0}, {"b", tensor.U64, []int64{1 << 58}, 0, 0},
		{"c", tensor.U64, []int64{1 << 58}, 0, 0}}); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("Place of more than 2^62 bytes: %v", err)
	}
}

// attacks returns headers that are made to be expensive. Each must be refused or read quickly, with at most 6 times
// its size plus 1 MiB of allocations, including garbage and the header itself. Only metadata may exceed this: it is
// stored in a Go map, which is larger for tiny entries, but their number is limited.
func attacks() map[string]string {
	const n = 1 << 20
	rep := func(format string, count int) string {
		var b strings.Builder
		for i := range count {
			fmt.Fprintf(&b, format, i)
		}
		return strings.TrimSuffix(b.String(), ",")
	}
	ones := strings.TrimSuffix(strings.Repeat("1,", 64), ",")
	return map[string]string{
		"braces in a name":  `{"` + strings.Repeat("}", n) + `":{` + one + `}}`,
		"escapes in a name": `{"` + strings.Repeat(`\u0041`, n/6) + `":{` + one + `}}`,
		"one deep list":     `{"a":{` + one + `,"x":` + strings.Repeat("[", n),
		"many small lists":  `{"a":{` + one + `,"x":[` + strings.TrimSuffix(strings.Repeat("[],", n/3), ",") + `]}}`,
		"many small objects": `{"a":{` + one + `,"x":[` + strings.TrimSuffix(strings.Repeat(`{"":0},`, n/7), ",") +
			`]}}`,
		"many keys":     `{"a":{` + one + `,"x":{` + rep(`"%x":0,`, n/9) + `}}}`,
		"many fields":   `{"a":{` + one + `,` + rep(`"%x":0,`, n/9) + `}}`,
		"much metadata": `{"__metadata__":{` + rep(`"%x":"",`, n/9) + `}}`,
		"small tensors": `{` + rep(`"%x":{"dtype":"U8","shape":[],"data_offsets":[0,0]},`, n/55) + `}`,
		"empty tensors": `{` + rep(`"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},`, n/56) + `}`,
		"wide shapes": `{` + rep(`"%x":{"dtype":"U8","shape":[0,`+ones[:125]+`],"data_offsets":[0,0]},`,
			n/181) + `}`,
		"a name, many times": `{` + strings.TrimSuffix(
			strings.Repeat(`"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},`, n/53), ",") + `}`,
		"a long number":   `{"a":{` + one + `,"x":` + strings.Repeat("1", n) + `}}`,
		"a long exponent": `{"a":{` + one + `,"x":1e` + strings.Repeat("1", n) + `}}`,
		"a long shape": `{"a":{"dtype":"U8","shape":[` + strings.Repeat("1,", n/2) +
			`1],"data_offsets":[0,1]}}`,
		"only space":           strings.Repeat(" ", n),
		"space between tokens": strings.ReplaceAll(`{"a":{`+one+`}}`, ":", ":"+strings.Repeat(" ", n/4)),
		"offsets backwards": `{` + rep(`"%x":{"dtype":"U8","shape":[1],"data_offsets":[9999999,10000000]},`, n/72) +
			`}`,
	}
}

func TestAttacks(t *testing.T) {
	for name, header := range attacks() {
		b := file(header, "")
		var before, after runtime.MemStats
		for _, lenient := range []bool{false, true} {
			runtime.GC()
			runtime.ReadMemStats(&before)
			start := time.Now()
			// the test's timeout ends a hang
			_, err := Parse("x", b, int64(len(b)), Options{Lenient: lenient})
			took := time.Since(start)
			runtime.ReadMemStats(&after)
			heap := int64(after.TotalAlloc-before.TotalAlloc) + int64(len(b))
			limit := 6*int64(len(b)) + 1<<20
			if name == "much metadata" {
				limit += 128 * maxMetadata
			}
			if heap > limit {
				t.Errorf("%s: %d bytes of heap for %d, err %v", name, heap, len(b), err)
			}
			t.Logf("%-22s lenient %-5v %5.2f x heap, %v, %.60v", name, lenient, float64(heap)/float64(len(b)), took,
				err)
		}
	}
}

func BenchmarkParse(b *testing.B) {
	for _, n := range []int{300, 18_867, 200_000} {
		entries, size := model(n)
		head, err := AppendHeader(nil, nil, entries, 0)
		if err != nil {
			b.Fatal(err)
		}
		same(b, parse(b, head, int64(len(head))+size), entries)
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(head)))
			for b.Loop() {
				if _, err := Parse("x", head, int64(len(head))+size, Options{}); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/tensor")
		})
	}
}

// The error for a file of a different format names the format and says what to do.
func TestOtherKinds(t *testing.T) {
	for head, want := range map[string]string{
		"PK\x03\x04 and more": "this is a zip archive, as written by torch.save and numpy.savez, not a safetensors file: " +
			"`overwire convert`",
		"GGUF\x03\x00\x00\x00":           "this is a GGUF file, not a safetensors file: overwire lists and verifies",
		"\x1f\x8b\x08 and more":          "this is a gzip file, not a safetensors file: decompress it with gunzip first",
		"version https://git-lfs":        "git lfs pull",
		"just some text, longer than it": "this is text, not a safetensors file: check the path",
		"\x08\x07\x12\x07pytorch":        "not a safetensors file: load it with the library that wrote it",
		"short":                          "this is text, not a safetensors file: check the path, or the URL of the download (it has ",
		"{}":                             "this is JSON, not a safetensors file: name the .safetensors file",
		"\x80\x04\x95 and more":          "this is a pickle, not a safetensors file",
		"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.":                 "this is a torch.save file from before torch 1.6, not a safetensors file: `torch.save(torch.load(f), f)`",
		"\x80\x04\x95\r\x00\x00\x00\x00\x00\x00\x00\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.": "this is a torch.save file from before torch 1.6, not a safetensors file: `torch.save(torch.load(f), f)`",
		strings.Repeat("x", 257) + "ustar":                                           "this is a tar archive",
	} {
		size := int64(1 << 40)
		if len(head) < 8 {
			size = int64(len(head))
		}
		if _, err := Length("", []byte(head), size); !errors.Is(err, errs.ErrFormat) ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", head, err)
		}
	}
}

// A container's notice is written and read back. It is refused in any other file, if there are two, and if a tensor has
// its name. Entries that are only similar are also refused.
func TestNotice(t *testing.T) {
	mark, say := map[string]string{ContainerKey: "x"}, NoticeEntry("say")
	first := Entry{Name: "w", DType: tensor.U8, Shape: []int64{64}, End: 64}
	written := func(metadata map[string]string, entries ...Entry) (Header, error) {
		head, err := AppendHeader(nil, metadata, entries, 0)
		if err != nil {
			return Header{}, err
		}
		return Parse("x", head, int64(len(head))+64, Options{})
	}
	for _, entries := range [][]Entry{{say, first}, {first, say}} {
		h, err := written(mark, entries...)
		if err != nil || h.Notice != "say" || len(h.Tensors) != 1 || h.Tensors[0].Name != "w" {
			t.Errorf("%v: %+v, %v", entries, h, err)
		}
		for _, metadata := range []map[string]string{nil, {}, {"Overwire": "x"}} {
			if _, err := written(metadata, entries...); !errors.Is(err, errs.ErrArgument) {
				t.Errorf("written without the mark: %v", err)
			}
		}
	}
	if h, err := written(mark, first); err != nil || h.Notice != "" {
		t.Errorf("without a notice: %q, %v", h.Notice, err)
	}
	const metadata, notice = `"__metadata__":{"overwire":"x"}`, `"say":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}`
	const w = `"w":{"dtype":"U8","shape":[64],"data_offsets":[0,64]}`
	for text, class := range map[string]error{
		metadata + "," + notice + "," + w: nil,
		notice + "," + w + "," + metadata: nil,
		notice + "," + w:                  errs.ErrFormat,
		metadata + "," + notice + "," + strings.Replace(notice, "say", "2", 1) + "," + w: errs.ErrFormat,
		metadata + "," + notice + "," + strings.Replace(w, "w", "say", 1):                errs.ErrFormat,
		metadata + "," + strings.Replace(notice, "[0]", "[]", 1) + "," + w:               errs.ErrFormat,
		metadata + "," + strings.Replace(notice, "[0]", "[0,1]", 1) + "," + w:            errs.ErrFormat,
		metadata + "," + strings.Replace(notice, "U8", "I8", 1) + "," + w:                errs.ErrFormat,
		metadata + "," + strings.Replace(notice, "1,1", "2,2", 1) + "," + w:              errs.ErrFormat,
		metadata + "," + strings.Replace(notice, "1,1", "1,2", 1) + "," + w:              errs.ErrFormat,
	} {
		head := binary.LittleEndian.AppendUint64(nil, uint64(len(text)+2))
		head = append(head, "{"+text+"}"...)
		if _, err := Parse("x", head, int64(len(head))+64, Options{}); !errors.Is(err, class) {
			t.Errorf("%s: %v", text, err)
		}
	}
}
