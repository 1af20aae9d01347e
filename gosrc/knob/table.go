package knob

import (
	"os"
	"path/filepath"
)

const prefix = "OVERWIRE_"

// The settings. Aliases are names of nyacomp's, kept so that its scripts and
// images go on working; ours win when both are set.
var (
	Preload = text("OVERWIRE_PRELOAD", "",
		"File, folder, index.json, pickle or meta.csv whose tensors start loading when overwire is imported.",
		alias{name: "PRELOAD_PATH"})
	PreloadDevice = text("OVERWIRE_PRELOAD_DEVICE", "cpu",
		"Device that the preload loads to; cpu leaves CUDA untouched, for programs that fork; cuda is the GPU of LOCAL_RANK.")
	NoPreload = flag("OVERWIRE_NO_PRELOAD",
		"Do not preload, whatever names a file.",
		alias{name: "NO_PRELOAD"}, alias{name: "LOAD_UNCOMPRESSED"})
	Patch = flag("OVERWIRE_PATCH",
		"Let what reads with the package safetensors read through overwire, from the import of overwire on.")
	Threads = number("OVERWIRE_THREADS", 0, 1024, 0,
		"Worker threads for reading, coding and decoding; 0 is one for each CPU that the process may use.",
		alias{name: "NUM_THREADS"})
	Downloader = text("OVERWIRE_DOWNLOADER", "",
		"Program that downloads http and https instead of overwire itself: it gets URLs as arguments and writes their bodies to its output.",
		alias{name: "DOWNLOADER_PATH"})
	DownloaderLog = text("OVERWIRE_DOWNLOADER_LOG", "",
		"File that what the downloader says of its trouble is added to.",
		alias{name: "DOWNLOAD_LOG", to: func(s string) string {
			if yes, _ := truth(s); yes {
				return filepath.Join(os.TempDir(), "downloader.log")
			}
			return ""
		}})
	MMap = choice("OVERWIRE_MMAP",
		"Whether plain tensors are mapped instead of read: auto maps plain files for the CPU, unless they lie on a network.",
		[]string{"auto", "on", "off"})
	Read = choice("OVERWIRE_READ",
		"How loads read local files: auto goes past the page cache for what is cold in a load larger than half of the memory left; gds is GPUDirect Storage, for plain tensors to a GPU, where it is real.",
		[]string{"auto", "buffered", "direct", "gds"})
	CPU = choice("OVERWIRE_CPU",
		"Decoder to use; one that this CPU lacks falls back to the best it has.",
		[]string{"auto", "scalar", "avx2", "avx512"})
	Log = choice("OVERWIRE_LOG",
		"Least severe messages that reach Python's logger \"overwire\".",
		[]string{"warning", "debug", "info", "error", "silent"},
		alias{name: "DEBUG", to: whenTrue("debug"), shared: true},
		alias{name: "SILENT", to: whenTrue("silent"), shared: true})
	Trace = text("OVERWIRE_TRACE", "",
		"File that gets a Chrome trace of the last load, for Perfetto.")
)

// table lists them all, in the order in which they are shown. A test compares
// it with the declarations above.
var table = []interface {
	load(map[string]string) string
	row() Row
}{
	Preload, PreloadDevice, NoPreload, Patch, Threads, Downloader, DownloaderLog, MMap, Read, CPU, Log, Trace,
}
