package cli

// This file describes the run command for help and completion. Python executes the command
// without the engine (python/overwire/_run.py).

import "github.com/overwire/overwire/gosrc/errs"

var runVerb = &verb{
	name: "run", args: "[--] PROGRAM ARGUMENTS...", least: 0, most: -1,
	short: "run an unmodified program with safetensors reading through overwire",
	long: `
Starts a program with the safetensors package patched to read through overwire, as
overwire.patch_safetensors() does. Compressed files then load like plain ones in
transformers, diffusers and everything else that uses safetensors. The patch reaches the
program and its child processes through PYTHONPATH; their Python must have overwire
installed. Nothing else changes. The exit status is that of the program.`,
	example: "overwire run python main.py --listen",
	run: func(*call) error {
		return errs.New(errs.ErrNotSupported, "run needs the overwire command of the Python package")
	},
}
