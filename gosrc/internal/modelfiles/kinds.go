package modelfiles

// The table of kinds of files that are found where safetensors weights were expected.

import "strings"

// A Kind is a kind of file that people have instead of weights, or whose weights another library reads.
type Kind struct {
	// Magics are what such a file has at Offset: one of them.
	Magics []string
	Offset int
	// What it is ("a GGUF file"), and what to do with it.
	What, Do string
	// Foreign says that it is a model's by rights: a folder of other weights may hold it. All else
	// stands where weights were expected.
	Foreign bool
}

// HeadBytes is how much of a file KindOf looks at.
const HeadBytes = 512

const (
	withTheirs = "load it with the library that wrote it, and save its tensors with overwire.save_file"
	// oldTorch is the number by which torch.save began a file before torch 1.6, as a pickle has it.
	oldTorch = "\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
	// oldFrame is a frame of protocol 4 and later around it.
	oldFrame = "\x95\r\x00\x00\x00\x00\x00\x00\x00" + oldTorch
)

// kinds are looked at in this order.
var kinds = []Kind{
	{Magics: []string{"PK\x03\x04"}, What: "a zip archive, as torch.save and numpy.savez write",
		Do: "`overwire convert` (overwire.convert) reads those of torch.save; load others with the library that " +
			"wrote them"},
	{Magics: []string{"\x80\x02" + oldTorch, "\x80\x03" + oldTorch, "\x80\x04" + oldFrame, "\x80\x05" + oldFrame,
		"L119547037146038801333356L\n."}, What: "a torch.save file of before torch 1.6",
		Do: "`torch.save(torch.load(f), f)` makes a newer one, which overwire.convert reads"},
	{Magics: []string{"\x80\x02", "\x80\x03", "\x80\x04", "\x80\x05"}, What: "a pickle", Do: withTheirs},
	{Magics: []string{"ustar"}, Offset: 257, What: "a tar archive, as torch.save wrote before torch 0.2",
		Do: "unpack it, or load it with the library that wrote it"},
	{Magics: []string{"GGUF"}, What: "a GGUF file", Do: "overwire lists and verifies GGUF files and reads no tensors " +
		"of them, since coding would take off 5 to 13 % of their quantised blocks: keep it as it is", Foreign: true},
	{Magics: []string{"lmgg", "fmgg", "tjgg", "algg"}, What: "a GGML file", Do: "keep it as it is", Foreign: true},
	{Magics: []string{"\x93NUMPY"}, What: "a .npy file", Do: withTheirs, Foreign: true},
	{Magics: []string{"\x89HDF"}, What: "an HDF5 file", Do: withTheirs, Foreign: true},
	{Magics: []string{"\x1f\x8b"}, What: "a gzip file", Do: "gunzip it first"},
	{Magics: []string{"version "}, What: "a Git LFS pointer", Do: "get the file itself by git lfs pull"},
	{Magics: []string{"<!DOCTYP", "<!doctyp", "<html"}, What: "a web page", Do: "check the URL that it came from"},
	{Magics: []string{"{"}, What: "JSON", Do: "name the .safetensors file; an index of shards must be called " +
		"*.index.json, and a trace is shown by overwire inspect TRACE.json --html PAGE.html"},
}

// ListKinds lists them.
func ListKinds() []Kind { return kinds }

// KindOf is the kind of the file that begins with head, which has HeadBytes where the file has; nil: no kind that
// is known.
func KindOf(head []byte) *Kind {
	for i := range kinds {
		k := &kinds[i]
		for _, magic := range k.Magics {
			if len(head) > k.Offset && strings.HasPrefix(string(head[k.Offset:min(len(head), HeadBytes)]), magic) {
				return k
			}
		}
	}
	return nil
}

// Unknown is what to do with a file of no kind.
const Unknown = withTheirs
