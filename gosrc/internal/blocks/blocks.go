// Package blocks caches blocks of bytes that are expensive to make.
package blocks

import (
	"container/list"
	"sync"

	"github.com/overwire/overwire/gosrc/errs"
)

// A Cache holds blocks. Each is made once, however many callers ask for it at the
// same time; the least recently used are dropped when there are too many bytes. It
// is safe for concurrent use.
type Cache[K comparable] struct {
	most int64
	mu   sync.Mutex
	size int64
	by   map[K]*Block[K]
	lru  list.List // of *Block[K] that are not in use, oldest first
}

// A Block's bytes are valid from Get to Put.
type Block[K comparable] struct {
	Data []byte

	key   K
	ready chan struct{}
	err   error
	users int
	place *list.Element // in lru
}

// New returns a cache of at most that number of bytes, besides those in use.
func New[K comparable](most int64) *Cache[K] {
	return &Cache[K]{most: most, by: map[K]*Block[K]{}}
}

// Need raises the limit to at least n bytes.
func (c *Cache[K]) Need(n int64) {
	c.mu.Lock()
	c.most = max(c.most, n)
	c.mu.Unlock()
}

// Get returns a block, made by fill if it is missing; the caller returns it with
// Put.
func (c *Cache[K]) Get(key K, fill func() ([]byte, error)) (*Block[K], error) {
	c.mu.Lock()
	e := c.by[key]
	if e != nil {
		e.users++
		if e.place != nil {
			c.lru.Remove(e.place)
			e.place = nil
		}
		c.mu.Unlock()
		<-e.ready // fill ends
		if e.err != nil {
			c.Put(e)
			return nil, e.err
		}
		return e, nil
	}
	e = &Block[K]{key: key, ready: make(chan struct{}), users: 1}
	c.by[key] = e
	c.mu.Unlock()

	e.err = errs.New(errs.ErrEngine, "a block was not made") // should fill panic
	defer close(e.ready)
	data, err := fill()
	c.mu.Lock()
	defer c.mu.Unlock()
	if e.Data, e.err = data, err; err != nil {
		delete(c.by, key) // the next one tries again
		return nil, err
	}
	c.size += int64(len(data))
	c.trim()
	return e, nil
}

// Put ends the use of a block.
func (c *Cache[K]) Put(e *Block[K]) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e.users--
	if e.users == 0 && c.by[e.key] == e {
		e.place = c.lru.PushBack(e)
		c.trim()
	}
}

// trim is called with mu held.
func (c *Cache[K]) trim() {
	for c.size > c.most && c.lru.Len() > 0 {
		e := c.lru.Remove(c.lru.Front()).(*Block[K])
		e.place = nil
		c.size -= int64(len(e.Data))
		delete(c.by, e.key)
	}
}
