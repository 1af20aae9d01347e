package knob

// This file defines all environment variables.

import (
	"os"
	"path/filepath"
)

const prefix = "OVERWIRE_"

// The settings. Each has a description for doctor --env and docs/settings.md, and a page with details. The aliases are
// names of nyacomp, so that its scripts and images still work; our name takes precedence if both are set. Python passes
// aliases only if the nyacomp drop-in is imported, because other programs also use such names.
var (
	Preload = text("OVERWIRE_PRELOAD", "", "preload.md",
		"Start loading this file, folder, index.json, pickle or meta.csv when overwire is imported.",
		alias{name: "PRELOAD_PATH"})
	PreloadDevice = text("OVERWIRE_PRELOAD_DEVICE", "cpu", "preload.md",
		"Device to preload to: cpu leaves CUDA untouched, for programs that fork; cuda is the GPU of LOCAL_RANK.")
	NoPreload = flag("OVERWIRE_NO_PRELOAD", "preload.md", "Do not preload, even if OVERWIRE_PRELOAD names a file.",
		alias{name: "NO_PRELOAD"}, alias{name: "LOAD_UNCOMPRESSED"})
	Patch = flag("OVERWIRE_PATCH", "transformers.md#unchanged-programs",
		"Patch the safetensors package when overwire is imported, so that unchanged programs read through overwire.")
	Cache = text("OVERWIRE_CACHE", "", "stores.md#keep-a-copy",
		"Folder that keeps downloaded objects, so that each is downloaded once; "+
			"on selects a folder in the user's cache folder.")
	CacheGB = number("OVERWIRE_CACHE_GB", 0, 1_000_000, 0, "stores.md#keep-a-copy",
		"Size limit in GB of OVERWIRE_CACHE; the least recently used objects are removed first; 0: no limit.")
	Ray = choice("OVERWIRE_RAY", "ray.md#settings",
		"Read objects from stores once for all nodes of a Ray cluster; auto: only in a cluster of several nodes.",
		[]string{"off", "auto", "on"})
	RayPieceMB = number("OVERWIRE_RAY_PIECE_MB", 1, 1024, 64, "ray.md#settings",
		"Size in MiB of the pieces that hosts share through Ray; it must be the same on all hosts.")
	RayPercent = number("OVERWIRE_RAY_PERCENT", 1, 90, 30, "ray.md#settings",
		"Maximum share of a host's Ray object store for shared pieces, in percent.")
	Prepared = text("OVERWIRE_PREPARED", "", "vllm.md#prepared-state",
		"Folder for the prepared models of the vLLM plug-in; if not set, a folder in the user's cache folder.")
	PreparedGB = number("OVERWIRE_PREPARED_GB", 1, 1<<20, 200, "vllm.md#prepared-state",
		"Size limit in GB of OVERWIRE_PREPARED, and of OVERWIRE_SLEEP_IMAGES; "+
			"the least recently used models are removed first.")
	SleepImages = text("OVERWIRE_SLEEP_IMAGES", "", "sleep.md#level-2-in-vllm",
		"Folder for files from which vLLM engines restore weights after a level-2 sleep; if not set, none are written.")
	Host = text("OVERWIRE_HOST", "off", "production.md#keep-models-in-memory",
		"Load local files from the host store (`overwire host`): off, auto (the user's own store), or the path of its "+
			"socket.")
	Log = choice("OVERWIRE_LOG", "metrics.md",
		"Log level: info logs loads and saves, debug also small ones and counters, json writes one object per line.",
		[]string{"warning", "debug", "info", "json", "error", "silent"},
		alias{name: "DEBUG", to: whenTrue("debug"), shared: true},
		alias{name: "SILENT", to: whenTrue("silent"), shared: true})
	Trace = text("OVERWIRE_TRACE", "", "gpu.md#where-the-time-goes",
		"Write a Chrome trace of the last load to this file; `overwire inspect --html` turns it into a page.")
	Threads = number("OVERWIRE_THREADS", 0, 1024, 0, "settings.md#threads",
		"Worker threads that read, encode and decode; 0: one per CPU that the process may use.",
		alias{name: "NUM_THREADS"})

	// Rarely needed.

	MMap = choice("OVERWIRE_MMAP", "settings.md#how-local-files-are-read",
		"Memory-map plain tensors instead of reading them; auto: only for the CPU, and only from local disks.",
		[]string{"auto", "on", "off"})
	Read = choice("OVERWIRE_READ", "settings.md#how-local-files-are-read",
		"How local files are read: through the page cache, by direct I/O, or by GPUDirect Storage.",
		[]string{"auto", "buffered", "direct", "gds"})
	Exchange = choice("OVERWIRE_EXCHANGE", "several-gpus.md#how-they-exchange",
		"How the ranks of a group pass bytes to each other: by mapped memory or torch.distributed.",
		[]string{"auto", "mapped", "collective", "none"})
	CPU = choice("OVERWIRE_CPU", "settings.md#decoders",
		"Decoder to use; if this CPU does not support it, the best supported decoder is used.",
		[]string{"auto", "scalar", "neon", "avx2", "avx512"})
	Downloader = text("OVERWIRE_DOWNLOADER", "", "nyacomp.md#variables",
		"Program that overwire runs to download http and https URLs; it writes them to its standard output.",
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

// table lists every setting in the order in which it is shown. A test compares it with the declarations above.
var table = []interface {
	load(map[string]string) string
	row() Row
}{
	Preload, PreloadDevice, NoPreload, Patch, Cache, CacheGB, Ray, RayPieceMB, RayPercent,
	Prepared, PreparedGB, SleepImages, Host, Log, Trace, Threads, MMap, Read, Exchange, CPU, Downloader, DownloaderLog,
}
