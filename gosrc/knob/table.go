package knob

// This file is the table of every environment variable.

import (
	"os"
	"path/filepath"
)

const prefix = "OVERWIRE_"

// The settings. The aliases are nyacomp's names, so that its scripts and images go on
// working; our name wins where both are set. Python passes them on only where
// nyacomp's drop-in is imported, since other programs have such names, too.
var (
	Preload = text("OVERWIRE_PRELOAD", "",
		"Start loading this file, folder, index.json, pickle or meta.csv when overwire is imported.",
		alias{name: "PRELOAD_PATH"})
	PreloadDevice = text("OVERWIRE_PRELOAD_DEVICE", "cpu",
		"Device to preload to: cpu leaves CUDA untouched, for programs that fork; cuda is the GPU of LOCAL_RANK.")
	NoPreload = flag("OVERWIRE_NO_PRELOAD",
		"Do not preload, even if OVERWIRE_PRELOAD names a file.",
		alias{name: "NO_PRELOAD"}, alias{name: "LOAD_UNCOMPRESSED"})
	Patch = flag("OVERWIRE_PATCH",
		"Let what reads with the package safetensors read through overwire, from the import of overwire on.")
	Prepared = text("OVERWIRE_PREPARED", "",
		"Folder in which the plug-in for vLLM keeps models as the engine holds them after its processing, where its extra configuration asks for that; empty is overwire/prepared in the cache folder of the user.")
	PreparedGB = number("OVERWIRE_PREPARED_GB", 1, 1<<20, 200,
		"GB that this folder may take; the models that were not used for the longest time go first.")
	Threads = number("OVERWIRE_THREADS", 0, 1024, 0,
		"Worker threads that read, encode and decode; 0 means one for each CPU that the process may use.",
		alias{name: "NUM_THREADS"})
	Downloader = text("OVERWIRE_DOWNLOADER", "",
		"Program that downloads http and https URLs instead of overwire: it takes URLs as arguments and writes their bodies to standard output.",
		alias{name: "DOWNLOADER_PATH"})
	DownloaderLog = text("OVERWIRE_DOWNLOADER_LOG", "",
		"Append the downloader's stderr to this file.",
		alias{name: "DOWNLOAD_LOG", to: func(s string) string {
			if yes, _ := truth(s); yes {
				return filepath.Join(os.TempDir(), "downloader.log")
			}
			return ""
		}})
	Cache = text("OVERWIRE_CACHE", "",
		"Folder that keeps whole objects of stores, and answers when they cannot be reached; on is overwire/objects in the cache folder of the user.")
	CacheGB = number("OVERWIRE_CACHE_GB", 0, 1_000_000, 0,
		"Most GB of objects in that folder: those that were used longest ago go first; 0 means no limit.")
	MMap = choice("OVERWIRE_MMAP",
		"Map plain tensors instead of reading them: auto maps plain files on local disks when the device is the CPU.",
		[]string{"auto", "on", "off"})
	Read = choice("OVERWIRE_READ",
		"How loads read local files: auto takes cached bytes from the page cache, and reads others by direct I/O (O_DIRECT) if they become tensors in the host's memory or the load is larger than half of the available memory; buffered and direct force one of the two; gds reads plain tensors straight into a GPU by GPUDirect Storage, where this machine has it.",
		[]string{"auto", "buffered", "direct", "gds"})
	Exchange = choice("OVERWIRE_EXCHANGE",
		"What brings the bytes that each rank of a group has read to the other ranks: mapped, the memory of the ranks of a host, which map each other's; collective, torch.distributed, whatever its backend, between all ranks; none, so that every rank reads what it needs; auto: mapped on GPUs, and on CPUs for what lies in a store, collective between several hosts for what lies in a store or on a network file system, or where ranks cannot map each other's memory, else none.",
		[]string{"auto", "mapped", "collective", "none"})
	CPU = choice("OVERWIRE_CPU",
		"Decoder to use; if this CPU lacks it, the best decoder that the CPU has is used.",
		[]string{"auto", "scalar", "neon", "avx2", "avx512"})
	Log = choice("OVERWIRE_LOG",
		"Lowest level of the messages of Python's logger \"overwire\", which go to standard error where the program has not set up logging: info has a line for each load and save, debug their counters too; json is info with a JSON object for each line, counters included.",
		[]string{"warning", "debug", "info", "json", "error", "silent"},
		alias{name: "DEBUG", to: whenTrue("debug"), shared: true},
		alias{name: "SILENT", to: whenTrue("silent"), shared: true})
	Trace = text("OVERWIRE_TRACE", "",
		"Write a Chrome trace of the last load to this file; `overwire inspect --html` makes a page of it.")
)

// table lists every setting in the order shown. A test compares it with the
// declarations above.
var table = []interface {
	load(map[string]string) string
	row() Row
}{
	Preload, PreloadDevice, NoPreload, Patch, Prepared, PreparedGB, Threads, Downloader, DownloaderLog, Cache, CacheGB, MMap, Read, Exchange, CPU, Log, Trace,
}
