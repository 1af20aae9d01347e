// Package api is the part of the face towards Python that gopy binds: free
// functions of integers and strings, each with one result and an error. What
// they mean is told in the room face; overwire/_engine.py calls them.
package api

import (
	"time"

	"github.com/overwire/overwire/gosrc/bind/face"
)

// done runs a verb that returns nothing: results that are only an error leak
// in gopy's glue, so such functions return 1.
func done(name string, fn func() error) (int, error) {
	return face.Call(name, func() (int, error) { return 1, fn() })
}

func Setup(env string) (string, error) {
	return face.Call("setup", func() (string, error) { return face.Setup(env) })
}

func Knobs() (string, error) { return face.Call("knobs", face.Knobs) }

func CodecNames() (string, error) { return face.Call("codecs", face.CodecNames) }

func GpuCount() (int, error) { return face.Call("gpu", face.GPUCount) }

func GpuNames() (string, error) { return face.Call("gpu", face.GPUNames) }

func GpuOf(address uint64) (int, error) {
	return face.Call("gpu", func() (int, error) { return face.GPUOf(address) })
}

func GpuUsed(device int, stream uint64) (int, error) {
	return done("gpu", func() error { return face.GPUUsed(device, stream) })
}

func GpuMode(mode int) (int, error) {
	return face.Call("gpu", func() (int, error) { return face.GPUMode(mode), nil })
}

func GpuFollow(device int, stream, after uint64) (int, error) {
	return done("gpu", func() error { return face.GPUFollow(device, stream, after) })
}

func GpuStreamNew(device int) (uint64, error) {
	return face.Call("gpu", func() (uint64, error) { return face.GPUStreamNew(device) })
}

func GpuStreamFree(device int, stream uint64) (int, error) {
	return done("gpu", func() error { return face.GPUStreamFree(device, stream) })
}

func GpuStreamSync(device int, stream uint64) (int, error) {
	return done("gpu", func() error { return face.GPUStreamSync(device, stream) })
}

func GpuStreamCheck(device int, stream uint64) (int, error) {
	return done("gpu", func() error { return face.GPUStreamCheck(device, stream) })
}

func GpuTransform(dtype string, sample uint64, n int64) (int, error) {
	return face.Call("gpu", func() (int, error) { return face.GPUTransform(dtype, sample, n) })
}

func GpuBatchFree(batch uint64) (int, error) {
	return done("gpu", func() error { face.GPUBatchFree(batch); return nil })
}

func CloseModel(model uint64) (int, error) {
	return done("close", func() error { face.CloseModel(model); return nil })
}

func ModelInfo(model uint64) (string, error) {
	return face.Call("info", func() (string, error) { return face.ModelInfo(model) })
}

func ModelPin(model uint64, options string) (uint64, error) {
	return face.Call("pin", func() (uint64, error) { return face.ModelPin(model, options) })
}

func DevicePrepare(name string) (int, error) {
	return done("prepare", func() error { face.Prepare(name); return nil })
}

func LoadSettle(job, pairs uint64, n int, stream uint64) (int, error) {
	return done("settle", func() error { return face.Settle(job, pairs, n, stream) })
}

func JobProgress(job uint64) (string, error) {
	return face.Call("progress", func() (string, error) { return face.Progress(job) })
}

func JobReport(job uint64) (string, error) {
	return face.Call("report", func() (string, error) { return face.Report(job) })
}

func JobCancel(job uint64) (int, error) {
	return done("cancel", func() error { return face.Cancel(job) })
}

func JobFree(job uint64) (int, error) {
	return done("free", func() error { face.Free(job); return nil })
}

func JobEnd(job uint64) (int, error) {
	return done("end", func() error { face.End(job); return nil })
}

func ConvertStart(spec string) (uint64, error) {
	return face.Call("convert", func() (uint64, error) { return face.ConvertStart(spec) })
}

func VerifyStart(spec string) (uint64, error) {
	return face.Call("verify", func() (uint64, error) { return face.VerifyStart(spec) })
}

func FetchStart(spec string) (uint64, error) {
	return face.Call("fetch", func() (uint64, error) { return face.FetchStart(spec) })
}

func CliStart(program string) (uint64, error) {
	return face.Call("cli", func() (uint64, error) { return face.CliStart(program) })
}

func PreloadStart(spec string) (uint64, error) {
	return face.Call("preload", func() (uint64, error) { return face.PreloadStart(spec) })
}

func PreloadJoin(model uint64, options string, ms int) (string, error) {
	return face.Call("preload", func() (string, error) {
		return face.PreloadJoin(model, options, time.Duration(ms)*time.Millisecond)
	})
}

func PreloadSweep(uri string) (string, error) {
	return face.Call("preload", func() (string, error) { return face.PreloadSweep(uri) })
}

func RelayStart(model uint64, spec string) (uint64, error) {
	return face.Call("relay", func() (uint64, error) { return face.RelayStart(model, spec) })
}

func RelayAim(job uint64, requests string) (int, error) {
	return done("relay", func() error { return face.RelayAim(job, requests) })
}

func RelayShares(job uint64) (string, error) {
	return face.Call("relay", func() (string, error) { return face.RelayShares(job) })
}

func RelayWait(job uint64, piece, ms int) (bool, error) {
	return face.Call("relay", func() (bool, error) {
		return face.RelayWait(job, piece, time.Duration(ms)*time.Millisecond)
	})
}

func RelayDecode(job uint64, piece int, stream uint64) (int, error) {
	return done("relay", func() error { return face.RelayDecode(job, piece, stream) })
}

func EmptyCache() (int, error) { return done("empty cache", face.EmptyCache) }

func Shutdown(ms int) (bool, error) {
	return face.Call("shutdown", func() (bool, error) {
		return face.Shutdown(time.Duration(ms) * time.Millisecond), nil
	})
}

// Panic panics: tests show with it that the guard holds.
func Panic() (int, error) { return done("panic", func() error { panic("asked for") }) }
