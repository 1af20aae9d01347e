package face

import (
	"context"
	"os"

	"github.com/overwire/overwire/gosrc/cli"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/source"
)

// A program is what Python tells about itself, and its command line.
type program struct {
	Argv    []string       `json:"argv"`
	Python  string         `json:"python"`
	Version string         `json:"version"`
	Storage source.Options `json:"storage"` // the environment of stores
	// Secrets are the variables that the command line names.
	Secrets map[string]string `json:"secrets"`
}

func (p program) env() cli.Env {
	return cli.Env{Python: p.Python, PythonVersion: p.Version, Storage: p.Storage, Secrets: p.Secrets}
}

// CliStart runs a command line as a job whose report is the exit status.
func CliStart(text string) (uint64, error) {
	p, err := parse[program]("command line", text)
	if err != nil {
		return 0, err
	}
	return start(job.Start("cli", func(ctx context.Context, j *job.Job) error {
		j.SetReport(cli.Main(ctx, j, p.Argv, os.Stdout, os.Stderr, p.env()))
		return nil
	})), nil
}
