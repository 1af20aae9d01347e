package hoststore

// This file opens files through a store.

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/source"
)

// An Opener opens a URI. outline says what the reader expects of the object.
type Opener = func(ctx context.Context, uri string, outline source.Outline) (source.Source, error)

// A Link takes the files of one model from a store. It connects at the first file, and disconnects when the last
// source from the store is closed. A nil Link is valid and uses no store.
type Link struct {
	path    string
	isAsked bool // a missing store is logged

	mu     sync.Mutex
	client *Client // nil before the first file and after the last one
	users  int     // the opening model, and the open sources from the store
	isLost bool    // the store is not asked again
	names  []string
	absent []*absentFile // files that the store does not have; nil once tensors of the model are loaded
	isRead bool          // tensors of the model were loaded
}

// NewLink returns the link of a model, or nil if it uses no store. ask is the caller's choice; if it is nil,
// the setting decides. The caller calls Done when all files are open.
func NewLink(ask *bool) *Link {
	path := knob.Host.Get()
	if ask == nil && path == off || ask != nil && !*ask {
		return nil
	}
	if path == off {
		path = auto
	}
	return &Link{path: path, isAsked: ask != nil || path != auto, users: 1}
}

// Done says that all files of the model are open.
func (l *Link) Done() {
	if l != nil {
		l.leave()
	}
}

func (l *Link) leave() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.users--; l.users == 0 && l.client != nil {
		l.client.Close()
		l.client = nil
	}
}

// Held returns how many files of the model came from the store.
func (l *Link) Held() int {
	if l == nil {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.names)
}

// NoteRead notes that tensors of the model are loaded. Only then are the files that the store lacks put into it, while
// they are read.
func (l *Link) NoteRead() {
	if l == nil {
		return
	}
	l.mu.Lock()
	absent := l.absent
	l.absent, l.isRead = nil, true
	l.mu.Unlock()
	for _, m := range absent {
		m.startPut()
	}
}

// Distrust drops the model's entries from the store, because their bytes were wrong.
func (l *Link) Distrust(ctx context.Context) {
	if l == nil {
		return
	}
	l.mu.Lock()
	client, names := l.client, l.names
	if client == nil {
		names = nil
	}
	l.names = l.names[len(names):]
	l.mu.Unlock()
	for _, name := range names {
		if _, err := client.Drop(ctx, name); err == nil {
			counts.distrusted.Add(1)
		}
	}
}

// Open returns an opener that uses open, and takes bytes that the store has from the store. A file that the store lacks
// is put there once the model's tensors are loaded. If the Link is nil, Open returns open.
func (l *Link) Open(open Opener) Opener {
	if l == nil {
		return open
	}
	return func(ctx context.Context, uri string, outline source.Outline) (source.Source, error) {
		src, err := open(ctx, uri, outline)
		if err != nil {
			return nil, err
		}
		return l.replace(ctx, src), nil
	}
}

// replace returns a source of the same bytes in the store, or one that reads src if the store does not have them.
func (l *Link) replace(ctx context.Context, src source.Source) source.Source {
	name, ok, err := labelOf(ctx, src)
	if err != nil || !ok {
		return src // the caller reads the same bytes and reports the error
	}
	client := l.connect(ctx, readsFiles)
	if client == nil {
		return src
	}
	bytes, err := client.fetch(ctx, name.name, name, src.Size(), src.URI())
	switch {
	case ctx.Err() != nil:
		return src
	case err != nil:
		counts.lost.Add(1)
		if errors.Is(err, errs.ErrCorrupt) {
			_, _ = client.Drop(ctx, name.name)
		}
		l.fail(err, readsFiles)
		return src
	case bytes == nil:
		counts.misses.Add(1)
		if src.Facts().File == nil {
			return src // reading a remote file again would be slow
		}
		m := &absentFile{Source: src, link: l, name: name.name,
			pace: &pace{loaded: make(chan struct{}), read: src.Facts().File}}
		l.mu.Lock()
		l.absent = append(l.absent, m)
		l.mu.Unlock()
		return m
	}
	was, facts := src.Facts(), bytes.Facts()
	// Other ranks and preloads may have opened the file itself, and identities are compared.
	facts.Identity, facts.Settled, facts.Headers = was.Identity, was.Settled, was.Headers
	facts.Now = func() (source.Identity, error) { return was.Identity, nil }
	facts.Remote = was.Remote && was.File != nil
	_ = src.Close()
	return l.noteUse(bytes, facts, name.name)
}

// noteUse returns a source from the store with the given facts. The link stays connected until that source is closed.
func (l *Link) noteUse(bytes source.Source, facts source.Facts, name string) source.Source {
	counts.hits.Add(1)
	counts.hitBytes.Add(bytes.Size())
	l.mu.Lock()
	l.users++
	l.names = append(l.names, name)
	l.mu.Unlock()
	return &hostFile{Source: bytes, facts: facts, leave: l.leave}
}

// readsFiles says in notices what a load without its store does.
const readsFiles = "reading the files instead"

// connect returns the client, or nil if the store cannot be reached. instead is as for fail.
func (l *Link) connect(ctx context.Context, instead string) *Client {
	l.mu.Lock()
	if l.client != nil || l.isLost {
		defer l.mu.Unlock()
		if l.isLost {
			return nil
		}
		return l.client
	}
	client, err := Dial(ctx, l.path)
	l.client = client
	l.mu.Unlock()
	if err != nil && ctx.Err() == nil {
		if l.isAsked || !errors.Is(err, errs.ErrNotFound) {
			counts.lost.Add(1)
			l.fail(err, instead)
		} else {
			l.mu.Lock()
			l.isLost = true
			l.mu.Unlock()
		}
	}
	return client
}

// fail makes the link continue without the store. It logs the first failure. instead says what is done instead.
func (l *Link) fail(err error, instead string) {
	l.mu.Lock()
	again := l.isLost
	l.isLost = true
	l.mu.Unlock()
	if !again {
		path, _ := Socket(l.path)
		if at, ok := errors.AsType[*errs.At](err); ok && at.Source == path {
			err = at.Err
		}
		source.Notice(fmt.Sprintf("host store %s: %s: %s", path, errs.Message(err), instead))
	}
}

// hostFile is a source from a store, with the facts of the file that it replaces.
type hostFile struct {
	source.Source
	facts source.Facts
	once  sync.Once
	leave func()
}

func (h *hostFile) Facts() source.Facts { return h.facts }

func (h *hostFile) Close() error {
	err := h.Source.Close()
	h.once.Do(h.leave)
	return err
}

// absentFile is a local file that the store does not have. A background put begins with the first load.
type absentFile struct {
	source.Source
	link *Link
	name string
	once sync.Once
	pace *pace
}

// startPut queues the file for the store; see putQueue.add.
func (m *absentFile) startPut() {
	_ = m.pace.read.WithFD(func(fd int) error {
		puts.add(m.link.path, m.name, fd, m.URI(), m.pace)
		return nil
	})
}

func (m *absentFile) Close() error {
	m.once.Do(func() {
		close(m.pace.loaded)
		m.link.mu.Lock()
		isRead := m.link.isRead
		m.link.mu.Unlock()
		if isRead {
			m.startPut()
		}
	})
	return m.Source.Close()
}

// Counted has counts since this process started: files and bytes taken from a store, files not found there, files and
// bytes put into it, failures of a store, and entries dropped because their bytes were wrong.
type Counted struct {
	Hits       int64 `json:"hits"`
	HitBytes   int64 `json:"hit_bytes"`
	Misses     int64 `json:"misses"`
	Puts       int64 `json:"puts"`
	PutBytes   int64 `json:"put_bytes"`
	Lost       int64 `json:"lost"`
	Distrusted int64 `json:"distrusted"`
}

var counts struct{ hits, hitBytes, misses, puts, putBytes, lost, distrusted atomic.Int64 }

// CountedFiles returns the counts so far.
func CountedFiles() Counted {
	return Counted{Hits: counts.hits.Load(), HitBytes: counts.hitBytes.Load(), Misses: counts.misses.Load(),
		Puts: counts.puts.Load(), PutBytes: counts.putBytes.Load(), Lost: counts.lost.Load(),
		Distrusted: counts.distrusted.Load()}
}
