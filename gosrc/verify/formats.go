package verify

// This file lists the formats that have checksums.

import (
	"context"
	"sync"

	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/stored"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/tensorizer"
)

// A check verifies the files of one format.
type check struct {
	// sums compares the checksums of source k that were not compared when it was opened. It is nil for formats without
	// checksums.
	sums   func(ctx context.Context, j *job.Job, m *stored.Model, k int, rep *Report) error
	counts bool // sums also checks and counts the tensors
}

// checks maps the name of a format to its check.
var checks = map[string]check{
	tensorizer.Format:     {sums: verifyTensors, counts: true},
	tensor.FormatOverwire: {sums: checkZeros},
}

// checkZeros checks that the padding of source k is zero.
func checkZeros(ctx context.Context, _ *job.Job, m *stored.Model, k int, _ *Report) error {
	return stored.CheckPadding(ctx, m.Sources[k], m.Index, k)
}

func verifyTensors(ctx context.Context, j *job.Job, m *stored.Model, k int, rep *Report) error {
	var mu sync.Mutex
	return tensorizer.Verify(ctx, m.Sources[k], tensorizer.Proof{
		Workers: knob.Workers(0), InOrder: m.Sources[k].Facts().Concurrency > 0,
		Passed: func(n int64) { j.Bytes.Add(n) },
		Proven: func(n int64) {
			mu.Lock()
			defer mu.Unlock()
			rep.Tensors++
			rep.Bytes += n
			j.Tensors.Add(1)
		},
	})
}
