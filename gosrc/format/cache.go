package format

import (
	"container/list"
	"sync"

	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// cacheBytes bounds what a Cache holds, about 400,000 tensors.
const cacheBytes = 64 << 20

// A Cache keeps the indexes of files that were opened, the latest ones up to
// a bound, so that opening such a file again reads and parses nothing. What it
// gives is of the very state of the file that is open: sources without an
// Identity, and files that were changed a moment ago, are not kept. The zero
// value is ready; it is safe for concurrent use.
type Cache struct {
	mu    sync.Mutex
	by    map[cacheKey]*list.Element // of *cached
	order list.List                  // the latest first
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

// key says under what a source's index is kept, if it is.
func (c *Cache) key(src source.Source, lenient bool) (k cacheKey, ok bool) {
	if c == nil {
		return k, false
	}
	f := src.Facts()
	return cacheKey{f.Identity, lenient}, f.File != nil && f.Settled
}

// get returns the index of a file under the name that it has now, or nil.
func (c *Cache) get(k cacheKey, uri string) *tensor.Index {
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

// put keeps the index of one source and drops the oldest ones for it.
func (c *Cache) put(k cacheKey, ix *tensor.Index) {
	e := &cached{k, ix, footprint(ix)}
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

// footprint is about how much memory an index takes.
func footprint(ix *tensor.Index) int64 {
	n := 1024 + 128*int64(len(ix.Tensors)) + 32*int64(len(ix.Chunks))
	for i := range ix.Tensors {
		n += int64(len(ix.Tensors[i].Name)) + 8*int64(len(ix.Tensors[i].Shape))
	}
	for _, s := range ix.Sources {
		for k, v := range s.Metadata {
			n += int64(len(k)+len(v)) + 64
		}
	}
	return n
}
