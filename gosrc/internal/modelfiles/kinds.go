package modelfiles

// This file is the table of file formats that are found where safetensors weights were
// expected.

import "strings"

// A Kind is a format that people have instead of safetensors weights, or that another library reads.
type Kind struct {
	// Magics are the possible bytes of such a file at Offset.
	Magics []string
	Offset int
	// What the file is ("a GGUF file"), and what to do with it.
	What, Do string
	// Foreign means that the file may be part of a model: a folder of other weights may contain
	// it. Other kinds are where weights were expected.
	Foreign bool
}

// HeadBytes is how much of a file KindOf examines.
const HeadBytes = 512

const (
	withTheirs = "load it with the library that wrote it, and save its tensors with overwire.save_file"
	// oldTorch is the number at the start of torch.save files before torch 1.6, as a pickle.
	oldTorch = "\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
	// oldFrame is the frame around it from protocol 4 on.
	oldFrame = "\x95\r\x00\x00\x00\x00\x00\x00\x00" + oldTorch
)

// kinds are tried in this order.
var kinds = []Kind{
	{Magics: []string{"PK\x03\x04"}, What: "a zip archive, as written by torch.save and numpy.savez",
		Do: "`overwire convert` (overwire.convert) reads torch.save files; load others with the library that " +
			"wrote them"},
	{Magics: []string{"\x80\x02" + oldTorch, "\x80\x03" + oldTorch, "\x80\x04" + oldFrame, "\x80\x05" + oldFrame,
		"L119547037146038801333356L\n."}, What: "a torch.save file from before torch 1.6",
		Do: "`torch.save(torch.load(f), f)` makes a newer one, which overwire.convert reads"},
	{Magics: []string{"\x80\x02", "\x80\x03", "\x80\x04", "\x80\x05"}, What: "a pickle", Do: withTheirs},
	{Magics: []string{"ustar"}, Offset: 257, What: "a tar archive, as written by torch.save before torch 0.2",
		Do: "unpack it, or load it with the library that wrote it"},
	{Magics: []string{"GGUF"}, What: "a GGUF file", Do: "overwire lists and verifies GGUF files, but does not " +
		"load or compress them, " +
		"because compression would save only 5 to 13 %: keep the file unchanged", Foreign: true},
	{Magics: []string{"lmgg", "fmgg", "tjgg", "algg"}, What: "a GGML file", Do: "keep it as it is", Foreign: true},
	{Magics: []string{"\x93NUMPY"}, What: "a .npy file", Do: withTheirs, Foreign: true},
	{Magics: []string{"\x89HDF"}, What: "an HDF5 file", Do: withTheirs, Foreign: true},
	{Magics: []string{"\x1f\x8b"}, What: "a gzip file", Do: "decompress it with gunzip first"},
	{Magics: []string{"version "}, What: "a Git LFS pointer", Do: "get the file itself with git lfs pull"},
	{Magics: []string{"<!DOCTYP", "<!doctyp", "<html"}, What: "a web page", Do: "check the URL of the download"},
	{Magics: []string{"{"}, What: "JSON", Do: "name the .safetensors file; an index of shards must be named " +
		"*.index.json, and overwire inspect TRACE.json --html PAGE.html shows a trace"},
}

// ListKinds lists them.
func ListKinds() []Kind { return kinds }

// KindOf returns the format of the file that begins with head, which has HeadBytes if the file does; nil if the
// format is unknown.
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

// Unknown says what to do with a file of unknown format.
const Unknown = withTheirs
