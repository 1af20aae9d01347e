// Package blocks caches blocks of bytes that are expensive to produce.
package blocks

import (
	"container/list"
	"context"
	"sync"

	"github.com/overwire/overwire/gosrc/errs"
)

// A Cache holds blocks. Each block is produced once, even if several callers request it in parallel. If the
// cache is full, it drops the least recently used blocks. It is safe for concurrent use.
type Cache[K comparable] struct {
	most int64
	mu   sync.Mutex
	size int64
	by   map[K]*Block[K]
	lru  list.List // unused blocks, of type *Block[K], oldest first
}

// A Block's bytes are valid from Get to Put.
type Block[K comparable] struct {
	Data []byte

	key   K
	ready chan struct{}
	err   error
	ended bool // the context of the caller that filled the block had ended
	users int
	place *list.Element // position in lru
}

// New returns a cache. The size limit is most bytes, unless the blocks in use need more.
func New[K comparable](most int64) *Cache[K] {
	return &Cache[K]{most: most, by: map[K]*Block[K]{}}
}

// Need raises the limit to at least n bytes.
func (c *Cache[K]) Need(n int64) {
	c.mu.Lock()
	c.most = max(c.most, n)
	c.mu.Unlock()
}

// Get returns a block, which fill produces if it is missing. The caller returns the block with Put. A caller
// stops waiting for another caller's fill when its own ctx ends. If a fill fails, all callers that wait for it
// get its error. If it was cancelled, one of them runs its own fill instead.
func (c *Cache[K]) Get(ctx context.Context, key K, fill func() ([]byte, error)) (*Block[K], error) {
	for {
		e, isKnown := c.takeBlock(key)
		if !isKnown {
			return e, c.fillBlock(ctx, e, fill)
		}
		select {
		case <-e.ready:
			if e.err == nil {
				return e, nil
			}
			c.Put(e)
			if !e.ended {
				return nil, e.err
			}
		case <-ctx.Done():
			c.Put(e)
			return nil, context.Cause(ctx)
		}
	}
}

// takeBlock returns the block of a key and adds a user. It adds the block if it is missing.
func (c *Cache[K]) takeBlock(key K) (e *Block[K], known bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, known = c.by[key]
	if !known {
		e = &Block[K]{key: key, ready: make(chan struct{})}
		c.by[key] = e
	}
	e.users++
	if e.place != nil {
		c.lru.Remove(e.place)
		e.place = nil
	}
	return e, known
}

// fillBlock fills a block. If that fails, the block is dropped, and the next caller tries again.
func (c *Cache[K]) fillBlock(ctx context.Context, e *Block[K], fill func() ([]byte, error)) error {
	e.err = errs.New(errs.ErrEngine, "a block was not filled") // in case fill panics
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		defer close(e.ready)
		if e.err != nil {
			delete(c.by, e.key)
			return
		}
		c.size += int64(len(e.Data))
		c.trimKept()
	}()
	e.Data, e.err = fill()
	e.ended = ctx.Err() != nil
	return e.err
}

// Put ends the use of a block.
func (c *Cache[K]) Put(e *Block[K]) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e.users--
	if e.users == 0 && c.by[e.key] == e {
		e.place = c.lru.PushBack(e)
		c.trimKept()
	}
}

// trimKept drops unused blocks while the cache is too large. The caller holds mu.
func (c *Cache[K]) trimKept() {
	for c.size > c.most && c.lru.Len() > 0 {
		e := c.lru.Remove(c.lru.Front()).(*Block[K])
		e.place = nil
		c.size -= int64(len(e.Data))
		delete(c.by, e.key)
	}
}
