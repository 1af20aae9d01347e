package cli

// This file describes the verb run, which Python carries out (python/overwire/_run.py):
// it replaces the process, and needs no engine for that.

import "github.com/overwire/overwire/gosrc/errs"

var runVerb = &verb{
	name: "run", args: "[--] PROGRAM ARGUMENTS...", least: 0, most: -1,
	short: "run a program as it stands, with safetensors reading through overwire",
	long: `
Starts a program in which the package safetensors reads through overwire, as under
overwire.patch_safetensors(): compressed files load like plain ones, in
transformers, diffusers and whatever else reads by that package. The program and
the processes that it starts find it by PYTHONPATH; their Python must have
overwire installed. Nothing else changes, and the program's exit status is
that of this command.`,
	example: "overwire run python main.py --listen",
	run: func(*call) error {
		return errs.New(errs.ErrNotSupported, "run is carried out by the command overwire of the Python package")
	},
}
