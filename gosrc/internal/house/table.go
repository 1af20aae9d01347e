package house

// This file is the table of packages: their imports, and every exception to a rule.

// module is the path that our own imports begin with.
const module = "github.com/overwire/overwire/gosrc/"

// mayImport lists the packages that a package may import. "x/..." is x and the
// packages below it. Every package must be listed: add it with its one duty to
// ARCHITECTURE.md first.
//
// The order follows a byte: words, bytes, formats, the plan, the pipeline, the
// verbs, the bindings. No package imports one that is further down.
var mayImport = map[string][]string{
	// The words: standard library only.
	"tensor": {"fault", "internal/sizes"}, // for the classes of its errors
	"fault":  {"internal/rawjson"},
	"knob":   {},

	"internal/spawn":      {"fault"},
	"internal/ordered":    {"fault", "internal/spawn"},
	"internal/house":      {},
	"internal/atomicfile": {"fault", "internal/regular"},
	"internal/sizes":      {},
	"internal/rawjson":    {},
	"internal/regular":    {"fault"},

	"job": {"fault", "internal/spawn", "internal/rawjson"},

	// Leaves: bytes, chunks, devices. They never import each other sideways.
	"source":            {"fault", "knob", "internal/..."},
	"source/file":       {"source", "fault", "knob", "internal/..."},
	"source/retry":      {"source", "fault", "knob", "internal/..."},
	"source/memory":     {"source", "fault"},
	"source/spool":      {"source", "fault", "internal/..."},
	"source/cache":      {"source", "source/file", "fault", "internal/..."},
	"source/pipe":       {"source", "source/route", "source/spool", "fault", "knob", "internal/..."},
	"source/route":      {"fault", "internal/..."},
	"source/http":       {"source", "source/retry", "source/route", "source/spool", "fault", "knob", "internal/..."},
	"source/parts":      {"source", "fault", "knob", "internal/..."},
	"source/s3":         {"source", "source/retry", "source/route", "source/parts", "fault", "knob", "internal/..."},
	"source/redis":      {"source", "source/retry", "source/parts", "fault", "knob", "internal/..."},
	"source/open":       {"source/...", "fault", "knob", "internal/..."},
	"source/sourcetest": {"source/...", "fault", "internal/..."},
	"codec":             {"codec/...", "tensor", "fault", "knob", "internal/..."},
	"codec/raw":         {"tensor", "fault", "internal/..."},
	"codec/x16":         {"tensor", "fault", "knob", "internal/..."},
	"codec/codectest":   {"codec/...", "tensor", "fault", "knob", "internal/..."},
	"device":            {"tensor", "fault", "internal/..."},
	"device/cpu":        {"device", "codec", "tensor", "fault", "knob", "internal/..."},
	"device/cuda":       {"device", "codec/x16", "tensor", "fault", "knob", "internal/..."},
	"device/gds":        {"fault", "internal/..."},
	"format":            {"format/...", "tensorizer", "tensor", "source", "fault", "internal/..."},
	"format/safetensors": {"tensor", "source", "fault",
		"internal/..."},
	// The container is a safetensors file (docs/format.md 1): one parser and
	// one validator serve both, so this one step sideways is meant.
	"format/overwire": {"format/safetensors", "tensor", "source", "fault", "codec",
		"internal/..."},

	// Wings: all that exists for another project's files. The tables of format and of
	// save name them; nothing else of the engine knows them.
	"tensorizer": {"tensor", "source", "fault", "internal/..."},

	"plan":     {"device", "tensor", "fault"}, // device for the words DecodeTask and View
	"pipeline": {"plan", "source", "codec", "device/...", "tensor", "fault", "internal/..."},
	"dlpack":   {"tensor", "device", "fault"},

	// The verbs.
	"load": {"format/...", "plan", "pipeline", "codec", "source", "source/open", "source/memory", "device/...", "job",
		"knob", "tensor", "fault", "internal/..."},
	"save": {"format/...", "tensorizer", "codec/...", "source", "source/open", "job", "knob", "tensor", "fault",
		"internal/..."},
	"preload": {"load", "source", "source/file", "source/open", "job", "device", "knob", "tensor", "fault", "internal/..."},
	"weights": {"tensor", "fault", "internal/..."},
	"serve":   {"fault", "internal/..."},
	"fetch":   {"source", "source/open", "job", "fault", "internal/..."},
	"measure": {"weights", "load", "save", "codec/x16", "device/cpu", "device/cuda", "job", "tensor", "fault", "internal/..."},
	"bench":   {"measure", "load", "save", "device/cuda", "job", "fault"},
	"cli": {"format", "tensorizer", "load", "save", "preload", "bench", "measure", "weights", "pipeline", "source", "source/open", "serve", "fetch", "device/...",
		"codec/...", "job", "knob", "tensor", "fault", "internal/..."},

	// The rig is a program beside the library: no package imports it.
	"rig": {"measure", "weights", "serve", "load", "save", "pipeline", "codec/...", "nvcomp/...", "device/...", "job", "knob", "tensor", "fault",
		"format", "tensorizer", "source", "source/file", "internal/..."},

	// The nvCOMP wing exists for nvCOMP's bitstreams only. The library imports package
	// nvcomp, but none of the packages below it.
	"nvcomp":          {"nvcomp/...", "codec/x16", "device", "device/cpu", "device/cuda", "knob", "tensor", "fault", "internal/..."},
	"nvcomp/lz4":      {"fault"},
	"nvcomp/snappy":   {"fault"},
	"nvcomp/zstd":     {"fault"},
	"nvcomp/deflate":  {"fault"},
	"nvcomp/gdeflate": {"fault"},
	"nvcomp/cascaded": {"fault"},

	// The face towards Python.
	"bind/api": {"bind/binding", "dlpack"},
	"bind/binding": {"tensorizer", "format", "load", "save", "nvcomp", "cli", "preload", "source", "source/open", "fetch", "codec/...", "device/...", "dlpack", "job",
		"knob",
		"tensor", "fault", "internal/..."},
	"bind/core": {"bind/api"},
	"bind/gen":  {"bind/binding", "device", "device/cuda", "fault", "knob", "source", "tensor"},
}

// modules lists the packages that may import a foreign module; "" is every package.
var modules = map[string][]string{
	"golang.org/x/sys":                        {""},
	"github.com/zeebo/xxh3":                   {"codec", "save", "format", "load", "source/cache"},
	"github.com/dustin/go-humanize":           {"cli", "rig"},
	"github.com/pierrec/lz4/v4":               {"nvcomp/lz4", "rig"}, // rig: a codec beside its library
	"github.com/klauspost/compress":           {"nvcomp/snappy", "nvcomp/zstd", "nvcomp/deflate", "rig"},
	"github.com/go-python/gopy":               {"bind"},
	"go.uber.org/goleak":                      {""},
	"golang.org/x/net/http/httpproxy":         {"source/route"},
	"github.com/aws/aws-sdk-go-v2":            {"source/s3"},
	"github.com/aws/smithy-go":                {"source/s3"}, // the SDK's errors
	"github.com/redis/go-redis":               {"source/redis"},
	"golang.org/x/crypto":                     {"tensorizer"},
	"github.com/overwire/overwire/cuda/built": {"device/cuda"}, // our own kernels, compiled
}

// cgoPackages may import "C". All else builds and tests with CGO_ENABLED=0.
var cgoPackages = []string{"bind", "bind/...", "dlpack", "device/cuda", "device/gds"}

// mayWrite lists the packages that write files without internal/atomicfile, and
// why.
var mayWrite = map[string]string{
	"source/cache": "names are made of contents and never replaced; syncing would cost more than fetching again",
	"source/spool": "a file without a name",
	"source/pipe":  "a log that is only added to",
	"measure":      "scratch files in a folder of its own",
	"rig":          "scratch files in the folder of its run",
}

// longFiles, longPackages and longFunctions are over the limit, each for a reason.
// An entry that is no longer needed fails.
var (
	longFiles    = map[string]string{}
	longPackages = map[string]string{
		"rig":         "a group of rows for each thing that is promised; they share models, child processes and the table",
		"device/cuda": "a thousand of its lines are the fake driver of its tests, which has to lie where cgo compiles it",
	}
	longFunctions = map[string]string{
		"internal/atomicfile.Publish": "one sequence of steps, each undone by the one before",
		"serve.fail":                  "one switch over the faults, to be a table",
	}
)

const (
	maxFileLines     = 600
	maxPackageLines  = 3000
	maxFunctionLines = 80
)

// vague are package names that say nothing of a duty.
var vague = []string{"util", "utils", "common", "helper", "helpers", "misc", "shared", "base", "lib"}
