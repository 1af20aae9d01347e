package save

// This file describes the state that the files of one save share.

import (
	"sync/atomic"

	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/save/publish"
)

// A session is the state of one save that the writers of its files share.
type session struct {
	spec    *Spec
	job     *job.Job
	threads int
	clock   clock
	cores   chan struct{} // semaphore that limits how many batches the host encodes at a time
	gpus    gpuGroup
	stage   *publish.StagedMemory // nil if the save is not staged
	onGPU   atomic.Int64          // bytes that GPUs have encoded
}

// A writerShare is one of several writers that run in parallel, each on one file after another: its number, the number
// of writers, and its number of threads.
type writerShare struct {
	number, of int
	threads    int
}
