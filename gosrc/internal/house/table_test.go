package house

// This file lists the packages, their imports, and every exception to a rule.

// module is the prefix of our own import paths.
const module = "github.com/overwire/overwire/gosrc/"

// mayImport lists the packages that a package may import. "x/..." means x and the packages below it. Every
// package must be listed; add it with its duty to ARCHITECTURE.md first.
//
// The order follows the path of a byte: types, bytes, formats, the plan, the pipeline, the commands, the
// bindings. No package imports one that is further down.
var mayImport = map[string][]string{
	// The basic types.
	"tensor": {"errs", "internal/sizes"}, // for the error classes
	"errs":   {"internal/rawjson"},
	"knob":   {"internal/near"},

	"internal/avx":                   {},
	"internal/avx/avxtest":           {"internal/avx"},
	"internal/crc32c":                {"internal/avx"},
	"internal/spawn":                 {"errs", "internal/spawn/internal/health"},
	"internal/spawn/internal/health": {},
	"internal/spawn/spawntest":       {"internal/spawn", "internal/spawn/internal/health"},
	"internal/ordered":               {"errs", "internal/spawn"},
	"internal/idle":                  {},
	"internal/blocks":                {"errs", "internal/spawn"},
	"internal/house":                 {},
	"internal/hostmem":               {},
	"internal/near":                  {},
	"internal/modelfiles":            {},
	"internal/nodes":                 {},
	"internal/atomicfile":            {"errs", "internal/regular", "internal/spawn"},
	"internal/sizes":                 {},
	"internal/sodium":                {},
	"internal/rawjson":               {},
	"internal/regular":               {"errs"},

	"job": {"errs", "internal/spawn", "internal/rawjson"},

	// Leaves: bytes, chunks, devices. They never import each other.
	"source":        {"errs", "knob", "internal/..."},
	"source/file":   {"source", "errs", "knob", "internal/..."},
	"source/retry":  {"source", "errs", "knob", "internal/..."},
	"source/memory": {"source", "errs"},
	"source/fed":    {"source", "errs", "internal/..."},
	"source/spool":  {"source", "source/retry", "errs", "internal/..."},
	"source/cache":  {"source", "source/file", "errs", "internal/..."},
	"source/pipe":   {"source", "source/route", "source/spool", "errs", "knob", "internal/..."},
	"source/route":  {"errs", "internal/..."},
	"source/http":   {"source", "source/retry", "source/route", "source/spool", "errs", "knob", "internal/..."},
	"source/parts":  {"source", "errs", "knob", "internal/..."},
	"source/s3": {"source", "source/retry", "source/route", "source/parts", "source/spool", "errs", "knob",
		"internal/..."},
	"source/redis":      {"source", "source/retry", "source/route", "source/parts", "errs", "knob", "internal/..."},
	"source/open":       {"source/...", "errs", "knob", "internal/..."},
	"source/sourcetest": {"source/...", "errs", "internal/..."},
	"codec":             {"codec/...", "tensor", "errs", "knob", "internal/..."},
	"codec/blocksum":    {},
	"codec/digest":      {"errs", "internal/..."},
	"codec/delta":       {"errs"},
	"codec/planes":      {"tensor", "errs", "internal/..."},
	"codec/x16":         {"tensor", "errs", "knob", "internal/..."},
	"codec/codectest":   {"codec/...", "tensor", "errs", "knob", "internal/..."},
	"device":            {"tensor", "errs", "internal/..."},
	"device/cpu":        {"device", "codec", "tensor", "errs", "knob", "internal/..."},
	"device/cuda/queue": {"device", "device/cuda/driver", "device/cuda/memory", "codec/x16", "tensor", "errs",
		"internal/..."},
	"device/cuda/stream": {"device", "device/cuda/driver", "device/cuda/memory", "codec/blocksum", "codec/digest",
		"errs", "internal/..."},
	"device/cuda":          {"device/cuda/...", "errs"},
	"device/cuda/cudatest": {"codec/x16"},
	"device/cuda/driver":   {"device", "device/cuda/cudatest", "errs", "internal/nodes"},
	"device/cuda/memory":   {"device", "device/cuda/driver", "errs", "internal/..."},
	"device/gds":           {"errs", "internal/..."},
	"device/pinned":        {"device/cuda", "device/cuda/memory", "errs", "internal/..."},
	"format":               {"format/...", "tensorizer", "tensor", "source", "errs", "internal/..."},
	"format/gguf":          {"source", "errs", "internal/sizes"},
	"format/safetensors": {"tensor", "source", "errs",
		"internal/..."},
	// The container is a safetensors file (docs/format.md 1). One parser and one validator serve both formats,
	// so this import is intended.
	"format/overwire": {"format/safetensors", "tensor", "source", "errs", "codec", "codec/digest",
		"internal/..."},

	// Another project's file format. Only the format and save packages, and the commands for such files, use
	// this package.
	"tensorizer": {"tensor", "source", "errs", "internal/..."},

	"plan":     {"device", "tensor", "errs", "internal/sizes"}, // for DecodeTask and View
	"pipeline": {"plan", "source", "codec", "device/...", "tensor", "errs", "internal/..."},
	"dlpack":   {"tensor", "device", "errs"},

	// Processes of one host that share memory.
	"peers":  {"device", "device/cuda", "device/cuda/queue", "errs", "internal/..."},
	"gather": {"device/cuda", "device/cuda/stream", "peers", "errs"},

	// The commands.
	"stored": {"codec", "format", "format/overwire", "source", "source/open", "tensor", "errs", "internal/..."},
	"unpack": {"stored", "codec", "source", "tensor", "errs", "internal/..."},
	"hoststore": {"codec", "codec/digest", "format", "format/overwire", "stored", "source", "source/file", "knob", "tensor",
		"errs", "internal/..."},
	"load": {"hoststore", "format/...", "plan", "pipeline", "unpack", "codec", "codec/digest", "source", "source/open",
		"source/memory", "device/...", "job",
		"knob", "tensor", "errs", "internal/..."},
	"load/loadtest": {"load", "save", "plan", "weights", "dlpack", "codec/digest", "device/...", "job",
		"internal/spawn/spawntest"},
	"relay": {"load", "plan", "pipeline", "source", "device/...", "peers", "job", "knob", "tensor", "errs",
		"internal/..."},
	"companions":    {"source", "source/file", "errs", "internal/..."},
	"save/original": {"stored", "format/overwire", "source", "tensor", "errs", "internal/..."},
	"save/publish": {"format/safetensors", "device/cuda", "device/pinned", "source", "source/open", "job", "tensor", "errs",
		"internal/..."},
	"save": {"save/original", "save/publish", "stored", "format", "format/overwire", "format/safetensors", "tensorizer",
		"codec", "codec/...", "device/cuda", "device/cuda/stream", "device/pinned", "source", "source/open", "job", "knob", "tensor", "errs",
		"internal/..."},
	"save/savetest": {"save", "stored", "format", "tensor"},
	"convert": {"save", "save/original", "save/publish", "stored", "companions", "format", "source", "source/open", "job",
		"errs", "internal/..."},
	"verify": {"stored", "save/original", "format", "format/gguf", "format/overwire", "tensorizer", "codec",
		"codec/digest", "source", "source/open", "job", "knob", "tensor", "errs", "internal/..."},
	"delta": {"convert", "save", "save/publish", "codec", "codec/delta", "codec/digest", "format", "format/overwire", "format/safetensors",
		"source", "source/memory", "source/open", "device", "device/cuda", "device/cuda/stream",
		"job", "tensor", "errs", "internal/..."},
	"sleep": {"load", "save", "hoststore", "format/overwire", "source", "source/memory", "codec", "codec/blocksum", "codec/digest",
		"codec/x16", "device",
		"device/cuda", "device/cuda/...", "device/pinned", "job", "tensor", "errs", "internal/..."},
	"preload": {"load", "source", "source/file", "source/open", "job", "device", "knob", "tensor", "errs",
		"internal/..."},
	"weights": {"tensor", "errs", "internal/..."},
	"serve":   {"errs", "internal/..."},
	"fetch":   {"source", "source/open", "job", "errs", "internal/..."},
	"bench": {"weights", "load", "save", "format", "codec/x16", "device", "device/cpu", "device/cuda",
		"device/cuda/...", "job", "tensor", "errs", "internal/..."},
	"page": {"verify", "errs"},
	"cli": {"page", "hoststore", "format", "tensorizer", "load", "stored", "save", "convert", "verify", "delta", "plan", "preload", "bench", "weights",
		"pipeline", "source", "source/open", "serve", "fetch", "device/...",
		"codec/...", "job", "knob", "tensor", "errs", "internal/..."},

	// The nvCOMP bitstreams. The library imports package nvcomp, but none of the packages below it.
	"nvcomp": {"nvcomp/...", "codec", "codec/x16", "device", "device/cpu", "device/cuda", "device/cuda/stream",
		"knob", "source", "tensor", "errs", "internal/..."},
	"nvcomp/lz4":      {"errs"},
	"nvcomp/snappy":   {"errs"},
	"nvcomp/zstd":     {"errs"},
	"nvcomp/deflate":  {"errs"},
	"nvcomp/gdeflate": {"errs"},
	"nvcomp/cascaded": {"errs"},

	// The Python binding.
	"bind/api": {"bind/binding", "dlpack"},
	"bind/binding": {"tensorizer", "hoststore", "format", "load", "stored", "save", "convert", "verify", "delta", "nvcomp", "cli", "bench",
		"preload", "sleep", "source", "source/cache", "source/fed", "source/open", "fetch", "codec/...", "device/...", "peers", "relay", "gather",
		"dlpack", "job",
		"knob",
		"tensor", "errs", "internal/..."},
	"bind/core": {"bind/api"},
	"bind/gen": {"bind/binding", "cli", "companions", "device", "device/cuda/queue", "errs", "internal/modelfiles", "knob",
		"source", "tensor", "verify"},
}

// modules lists the packages that may import a third-party module; "" means every package.
var modules = map[string][]string{
	"golang.org/x/sys": {""},
	"github.com/zeebo/xxh3": {"codec", "codec/blocksum", "device/cuda", "hoststore", "save", "verify", "sleep", "format",
		"load", "source/cache", "internal/atomicfile"},
	"github.com/dustin/go-humanize":           {"cli"},
	"github.com/pierrec/lz4/v4":               {"nvcomp/lz4"},
	"github.com/klauspost/compress":           {"nvcomp/snappy", "nvcomp/zstd", "nvcomp/deflate", "codec/planes"},
	"github.com/go-python/gopy":               {"bind"},
	"go.uber.org/goleak":                      {""},
	"golang.org/x/net/http/httpproxy":         {"source/route"},
	"github.com/aws/aws-sdk-go-v2":            {"source/s3"},
	"github.com/aws/smithy-go":                {"source/s3"}, // for the SDK's errors
	"github.com/redis/go-redis":               {"source/redis"},
	"golang.org/x/crypto":                     {"tensorizer"},
	"github.com/overwire/overwire/cuda/built": {"device/cuda"}, // our own compiled kernels
}

// cgoPackages may import "C". Packages that import none of them can be built and tested with CGO_ENABLED=0.
var cgoPackages = []string{"bind", "bind/...", "dlpack", "device/cuda/...",
	"device/gds", "internal/sodium"}

// mayWrite lists the packages that write files without internal/atomicfile, with the reason.
var mayWrite = map[string]string{
	"source/cache": "files are named by their content and never replaced; syncing would cost more than fetching again",
	"source/spool": "an unnamed file",
	"source/pipe":  "a log file, opened for appending",
	"bench":        "scratch files in its own folder",
}

// longPackages lists the packages over the limit, with the reason. An unneeded entry fails. There is no such
// list for files and functions.
var longPackages = map[string]string{
	"cli": "each command is a few lines that call other packages; all share the parsing of arguments and the output",
}

const (
	maxFileLines     = 600
	maxPackageLines  = 3000
	maxFunctionLines = 80
	maxFields        = 15 // for structs in narrow packages
)

// vague are package names that do not state a duty.
var vague = []string{"util", "utils", "common", "helper", "helpers", "misc", "shared", "base", "lib"}

// narrow lists packages whose structs must be small: code in which several goroutines and processes run in
// parallel is easier to understand in small parts.
var narrow = []string{"codec/...", "plan", "relay", "save/...", "convert", "verify", "stored"}

// wideStructs lists structs with more fields than narrow packages allow, including the fields of embedded
// structs. The numbers may only be lowered.
var wideStructs = map[string]int{
	"relay.Report": 16,
	"relay.Spec":   18,
	"save.Report":  16,
}

// scatteredMethods lists types with methods in several files. The numbers may only be lowered.
var scatteredMethods = map[string]int{
	"bind/binding.Verb":    2,
	"codec/planes.Encoder": 2,
	"codec/x16.Encoder":    3,
	"codec/x16.decoder":    7,
	"codec/x16.fastTables": 3,
	"plan.maker":           2,
	"serve.Server":         2,
	"source/http.object":   2,
	"source/retry.Source":  2,
	"source/s3.client":     2,
	"source/s3.settings":   2,
	"source/s3.upload":     2,
	"tensor.Index":         2,
}
