package save

// This file describes what the files of one save share.

import (
	"sync/atomic"

	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/save/publish"
)

// A session is one save as the writers of its files see it.
type session struct {
	spec    *Spec
	job     *job.Job
	threads int
	clock   clock
	cores   chan struct{} // one for each chunk that the host encodes now
	gpus    gpuGroup
	stage   *publish.StagedMemory // nil: files are written as their bytes are made
	onGPU   atomic.Int64          // bytes that GPUs have encoded
}

// A writerShare is one of the writers that are at work at once, each on one file after the other: its number
// among them, how many there are, and how many threads it has.
type writerShare struct {
	number, of int
	threads    int
}
