package cli

// This file describes the command run. Python executes it (python/overwire/_run.py): it
// replaces the process, and needs no engine for that.

import "github.com/overwire/overwire/gosrc/errs"

var runVerb = &verb{
	name: "run", args: "[--] PROGRAM ARGUMENTS...", least: 0, most: -1,
	short: "run an unmodified program with safetensors reading through overwire",
	long: `
Starts a program in which the package safetensors reads through overwire, as under
overwire.patch_safetensors(). Compressed files then load like plain ones in
transformers, diffusers and everything else that uses that package. The program and
the processes that it starts are patched through PYTHONPATH; their Python must have
overwire installed. Nothing else changes, and the exit status is that of the program.`,
	example: "overwire run python main.py --listen",
	run: func(*call) error {
		return errs.New(errs.ErrNotSupported, "run needs the overwire command of the Python package")
	},
}
