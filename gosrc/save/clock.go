package save

// This file times the stages of a save.

import (
	"fmt"
	"sync/atomic"
	"time"
)

// Stages holds the time of each stage of a save in nanoseconds, summed over its threads.
type Stages struct {
	PlanNS    int64 `json:"plan_ns"`    // choosing how tensors are stored, and allocating memory
	ReadNS    int64 `json:"read_ns"`    // reading from files, or copying from a GPU
	EncodeNS  int64 `json:"encode_ns"`  // encoding on the host, or waiting for a GPU to encode
	HashNS    int64 `json:"hash_ns"`    // computing checksums and hashes on the host
	WriteNS   int64 `json:"write_ns"`   // writing to stores, to staged memory, or to files, including syncs
	PublishNS int64 `json:"publish_ns"` // giving the files their names
}

// InSeconds lists the stages in seconds.
func (s Stages) InSeconds() string {
	return fmt.Sprintf("plan %.2f, read %.2f, encode %.2f, hash %.2f, write %.2f, publish %.2f",
		secondsOf(s.PlanNS), secondsOf(s.ReadNS), secondsOf(s.EncodeNS), secondsOf(s.HashNS), secondsOf(s.WriteNS),
		secondsOf(s.PublishNS))
}

// A clock adds up Stages.
type clock struct{ plan, read, encode, hash, write, publish atomic.Int64 }

func (c *clock) listStages() Stages {
	return Stages{PlanNS: c.plan.Load(), ReadNS: c.read.Load(), EncodeNS: c.encode.Load(), HashNS: c.hash.Load(),
		WriteNS: c.write.Load(), PublishNS: c.publish.Load()}
}

func (s *Stages) addStages(o Stages) {
	s.PlanNS += o.PlanNS
	s.ReadNS += o.ReadNS
	s.EncodeNS += o.EncodeNS
	s.HashNS += o.HashNS
	s.WriteNS += o.WriteNS
	s.PublishNS += o.PublishNS
}

func secondsOf(ns int64) float64 { return float64(ns) / 1e9 }

// addLap adds the time since start to a stage, and returns the current time.
func addLap(stage *atomic.Int64, start time.Time) time.Time {
	now := time.Now()
	stage.Add(int64(now.Sub(start)))
	return now
}
