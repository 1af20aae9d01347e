package cache

// This file counts what the caches of this process do, for operators.

import "sync/atomic"

// Counts counts objects since the process began. Hits were found in a folder, fetches came from their store, and
// away counts the hits that were used because their store could not be reached.
type Counts struct {
	Hits       int64 `json:"hits"`
	HitBytes   int64 `json:"hit_bytes"`
	Fetches    int64 `json:"fetches"`
	FetchBytes int64 `json:"fetch_bytes"`
	Away       int64 `json:"away"`
	Evictions  int64 `json:"evictions"`
}

var counts struct{ hits, hitBytes, fetches, fetchBytes, away, evictions atomic.Int64 }

// CountedObjects returns the counts so far.
func CountedObjects() Counts {
	return Counts{
		Hits: counts.hits.Load(), HitBytes: counts.hitBytes.Load(),
		Fetches: counts.fetches.Load(), FetchBytes: counts.fetchBytes.Load(),
		Away: counts.away.Load(), Evictions: counts.evictions.Load(),
	}
}

// CountAway counts an object that Last gave because its store could not be reached.
func CountAway() { counts.away.Add(1) }
