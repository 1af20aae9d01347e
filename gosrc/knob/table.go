package knob

// The table of every environment variable.

import (
	"os"
	"path/filepath"
)

const prefix = "OVERWIRE_"

// The settings. Each has a line for doctor --env and docs/settings.md, and the page with
// details. The aliases are nyacomp's names, so that its scripts and images still work;
// our name wins if both are set. Python passes aliases on only if nyacomp's drop-in is
// imported, because other programs also use such names.
var (
	Preload = text("OVERWIRE_PRELOAD", "", "preload.md",
		"Start loading this file, folder, index.json, pickle or meta.csv when overwire is imported.",
		alias{name: "PRELOAD_PATH"})
	PreloadDevice = text("OVERWIRE_PRELOAD_DEVICE", "cpu", "preload.md",
		"Device to preload to: cpu leaves CUDA untouched, for programs that fork; cuda is the GPU of LOCAL_RANK.")
	NoPreload = flag("OVERWIRE_NO_PRELOAD", "preload.md",
		"Do not preload, even if OVERWIRE_PRELOAD names a file.",
		alias{name: "NO_PRELOAD"}, alias{name: "LOAD_UNCOMPRESSED"})
	Patch = flag("OVERWIRE_PATCH", "transformers.md#unchanged-programs",
		"Make programs that use the safetensors package read through overwire, from the import of overwire on.")
	Cache = text("OVERWIRE_CACHE", "", "stores.md#keep-a-copy",
		"Folder that keeps whole objects of stores, for when they cannot be reached; on: in the user's cache folder.")
	CacheGB = number("OVERWIRE_CACHE_GB", 0, 1_000_000, 0, "stores.md#keep-a-copy",
		"Most GB of objects in that folder; those used longest ago are removed first; 0: no limit.")
	Prepared = text("OVERWIRE_PREPARED", "", "vllm.md#prepared-state",
		"Folder in which the vLLM plug-in keeps models as the engine holds them; default: in the user's cache folder.")
	PreparedGB = number("OVERWIRE_PREPARED_GB", 1, 1<<20, 200, "vllm.md#prepared-state",
		"Most GB in that folder; the models used longest ago are removed first.")
	Log = choice("OVERWIRE_LOG", "metrics.md",
		"Log level: info logs one line per load and save, debug also counters, json one object per line.",
		[]string{"warning", "debug", "info", "json", "error", "silent"},
		alias{name: "DEBUG", to: whenTrue("debug"), shared: true},
		alias{name: "SILENT", to: whenTrue("silent"), shared: true})
	Trace = text("OVERWIRE_TRACE", "", "gpu.md#where-the-time-goes",
		"Write a Chrome trace of the last load to this file; `overwire inspect --html` makes a page of it.")
	Threads = number("OVERWIRE_THREADS", 0, 1024, 0, "settings.md#threads",
		"Worker threads that read, encode and decode; 0: one for each CPU that the process may use.",
		alias{name: "NUM_THREADS"})

	// Rarely needed.

	MMap = choice("OVERWIRE_MMAP", "settings.md#how-local-files-are-read",
		"Map plain tensors instead of reading them: auto maps those of local disks for the CPU.",
		[]string{"auto", "on", "off"})
	Read = choice("OVERWIRE_READ", "settings.md#how-local-files-are-read",
		"How local files are read: through the page cache, by direct I/O, or by GPUDirect Storage.",
		[]string{"auto", "buffered", "direct", "gds"})
	Exchange = choice("OVERWIRE_EXCHANGE", "several-gpus.md#how-they-exchange",
		"How the ranks of a group pass bytes to each other: by mapped memory or torch.distributed.",
		[]string{"auto", "mapped", "collective", "none"})
	CPU = choice("OVERWIRE_CPU", "settings.md#decoders",
		"Decoder to use; if this CPU lacks it, the best one that it has.",
		[]string{"auto", "scalar", "neon", "avx2", "avx512"})
	Downloader = text("OVERWIRE_DOWNLOADER", "", "nyacomp.md#variables",
		"Program that downloads http and https URLs instead of overwire, to its standard output.",
		alias{name: "DOWNLOADER_PATH"})
	DownloaderLog = text("OVERWIRE_DOWNLOADER_LOG", "", "nyacomp.md#variables",
		"Append the downloader's stderr to this file.",
		alias{name: "DOWNLOAD_LOG", to: func(s string) string {
			if yes, _ := truth(s); yes {
				return filepath.Join(os.TempDir(), "downloader.log")
			}
			return ""
		}})
)

// table lists every setting in the order shown. A test compares it with the
// declarations above.
var table = []interface {
	load(map[string]string) string
	row() Row
}{
	Preload, PreloadDevice, NoPreload, Patch, Cache, CacheGB, Prepared, PreparedGB, Log, Trace, Threads,
	MMap, Read, Exchange, CPU, Downloader, DownloaderLog,
}
