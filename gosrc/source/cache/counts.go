package cache

// This file counts the operations of this process's caches.

import "sync/atomic"

// Counts are numbers of objects and bytes since the process started. Hits came from a folder and fetches from
// the store. Away counts the hits that were used because the store could not be reached.
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

// CountAway counts an object that Last returned because its store could not be reached.
func CountAway() { counts.away.Add(1) }
