package format

// This file caches the indexes of recently opened files.

import (
	"container/list"
	"sync"

	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// cacheBytes limits the memory of a Cache. This is enough for about 400,000 tensors.
const cacheBytes = 64 << 20

// A Cache keeps the indexes of recently opened files, so that opening one again reads and parses nothing. To return
// only indexes that match the file's current state, it skips sources without an Identity and files that changed a
// moment ago. The zero value is ready to use. A Cache is safe for concurrent use.
type Cache struct {
	mu    sync.Mutex
	by    map[cacheKey]*list.Element // elements are *cached
	order list.List                  // most recently used first
	bytes int64
}

type cacheKey struct {
	id      source.Identity
	lenient bool
}

type cached struct {
	key   cacheKey
	index *tensor.Index
	bytes int64
}

// key returns the key of a source's index. ok is false if the index must not be cached.
func (c *Cache) key(src source.Source, lenient bool) (k cacheKey, ok bool) {
	if c == nil {
		return k, false
	}
	f := src.Facts()
	return cacheKey{f.Identity, lenient}, f.File != nil && f.Settled
}

// getIndex returns the index of a cached file with URI set to uri, or nil.
func (c *Cache) getIndex(k cacheKey, uri string) *tensor.Index {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.by[k]
	if e == nil {
		return nil
	}
	c.order.MoveToFront(e)
	was := e.Value.(*cached).index
	s := was.Sources[0]
	s.URI = uri
	return &tensor.Index{Sources: []tensor.Source{s}, Tensors: was.Tensors, Chunks: was.Chunks}
}

// put stores the index of one source, and evicts the least recently used ones if the cache is full.
func (c *Cache) put(k cacheKey, ix *tensor.Index) {
	e := &cached{k, ix, footprintOf(ix)}
	c.mu.Lock()
	defer c.mu.Unlock()
	if e.bytes > cacheBytes || c.by[k] != nil {
		return
	}
	if c.by == nil {
		c.by = map[cacheKey]*list.Element{}
	}
	c.by[k] = c.order.PushFront(e)
	c.bytes += e.bytes
	for c.bytes > cacheBytes {
		last := c.order.Remove(c.order.Back()).(*cached)
		delete(c.by, last.key)
		c.bytes -= last.bytes
	}
}

// footprintOf estimates the memory of an index.
func footprintOf(ix *tensor.Index) int64 {
	n := 1024 + 128*int64(len(ix.Tensors)) + 32*int64(len(ix.Chunks))
	for i := range ix.Tensors {
		n += int64(len(ix.Tensors[i].Name)) + 8*int64(len(ix.Tensors[i].Shape))
	}
	for _, s := range ix.Sources {
		n += int64(len(s.Mark))
		for k, v := range s.Metadata {
			n += int64(len(k)+len(v)) + 64
		}
	}
	return n
}
