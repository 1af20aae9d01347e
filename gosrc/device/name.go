package device

// This file parses names of devices.

import (
	"strconv"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
)

// Host and AnyGPU are the results of Number for the host and for the current GPU.
const (
	Host   = -2
	AnyGPU = -1
)

// Number parses a device name as torch writes it: "cpu", "cuda", "cuda:1".
func Number(name string) (int64, error) {
	kind, number, hasNumber := strings.Cut(name, ":")
	n, err := strconv.ParseUint(number, 10, 16)
	switch {
	case kind == "" || hasNumber && err != nil:
		return 0, errs.New(errs.ErrArgument,
			"device %q: expected \"cpu\", \"cuda\", \"cuda:1\", a torch.device or an int", name)
	case kind == "cpu":
		return Host, nil
	case kind == "gpu":
		return 0, errs.New(errs.ErrNotSupported, "device %q: write \"cuda%s\", as in torch, or \"cpu\"",
			name, name[len(kind):])
	case kind != "cuda":
		return 0, errs.New(errs.ErrNotSupported, "device %q: only \"cpu\" and \"cuda\" are supported", name)
	case !hasNumber:
		return AnyGPU, nil
	}
	return int64(n), nil
}
