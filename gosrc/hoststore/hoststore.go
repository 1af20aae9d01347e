// Package hoststore keeps the stored bytes of model files in memory for all processes of one user on one machine.
//
// A store is a process that owns sealed memfds, which no process can change, and maps names to them. A client sends
// commands over a Unix socket and receives a descriptor; the bytes never cross the socket. The name of a file is the
// digest of its identity and of what it begins with: its header, and for a container its index. A header and checksums
// do not prove the other bytes, because anyone can write another file with the same ones. The name of a container of
// sleeping tensors, which has no file, is the SHA-256 of all its bytes.
//
// If the store does not have a file, a client can put it there: it asks for a writable memfd, copies the file into it,
// and asks the store to seal it. The store then verifies all checksums before it gives the file to any client. The
// store allocates the memory, so the client's control group is not charged for it.
//
// Running loads never depend on the store: a client that has a descriptor keeps the bytes when the store ends, and a
// client that loses the store reads the file. Entries that a connection has fetched are in use until the connection
// ends. Entries in use are never evicted. Clients and stores accept only processes of their own user.
package hoststore

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/hostmem"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/knob"
	"golang.org/x/sys/unix"
)

// The values of OVERWIRE_HOST that are not paths.
const (
	off  = "off"
	auto = "auto"
)

// Socket returns the path of a store's socket. "" and "auto" stand for the user's own store.
func Socket(path string) (string, error) {
	if path == "" || path == auto {
		return filepath.Join(defaultFolder(), "host.sock"), nil
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return "", errs.FromOS(err)
	}
	return path, nil
}

// defaultFolder returns the folder of the user's own store: below XDG_RUNTIME_DIR if that is a folder of this user,
// otherwise below /tmp.
func defaultFolder() string {
	if dir := knob.RuntimeFolder(); filepath.IsAbs(dir) && checkFolder(dir, 0o022) == nil {
		return filepath.Join(dir, "overwire")
	}
	return filepath.Join("/tmp", fmt.Sprintf("overwire-%d", os.Geteuid()))
}

// makeFolder creates the folder of a socket if it is the default one, and checks that no other user can replace
// the socket.
func makeFolder(dir string) error {
	if dir != defaultFolder() {
		return regular.RefusePlanted(dir)
	}
	if err := unix.Mkdir(dir, 0o700); err != nil && err != unix.EEXIST {
		return errs.FromOS(&os.PathError{Op: "mkdir", Path: dir, Err: err})
	}
	return checkFolder(dir, 0o077)
}

// checkFolder refuses a path that is not a folder of this user, is a link, or has one of the mode bits in open.
func checkFolder(dir string, open uint32) error {
	var st unix.Stat_t
	if err := regular.Again(func() error { return unix.Lstat(dir, &st) }); err != nil {
		return errs.FromOS(&os.PathError{Op: "stat", Path: dir, Err: err})
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || st.Uid != uint32(os.Geteuid()) || st.Mode&open != 0 {
		return errs.New(errs.ErrPermission, "%s must be a folder, not a link, that belongs to this user and that "+
			"other users cannot access (owner %d, mode %o)", dir, st.Uid, st.Mode&0o777)
	}
	return nil
}

const (
	// step is how much memory is allocated at a time. The kernel undoes an interrupted step.
	step = 64 << 20
	// spare is the memory that a put leaves to the machine or the control group.
	spare      = 128 << 20
	maxEntries = 4096
	// seals are the seals of a ready entry: its bytes and its size never change.
	seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
)

// An Item describes an entry in a report.
type Item struct {
	Name  string    `json:"name"`
	Label string    `json:"label"` // the path of the file that it was read from
	Size  int64     `json:"size"`
	Users int       `json:"users"` // connections that use it
	Used  time.Time `json:"used"`  // when it was last fetched or put
	State string    `json:"state"` // ready, writing or dropped
}

// A Report describes a store. Used includes entries that are being written, and dropped ones that are in use. The
// counters start at 0 when the store starts.
type Report struct {
	Socket    string `json:"socket"`
	Budget    int64  `json:"budget"`
	Used      int64  `json:"used"`
	Available int64  `json:"available"` // memory of the machine or the control group that is left
	Entries   []Item `json:"entries"`
	Counts    Counts `json:"counts"`
}

// Counts has the numbers of commands and of evictions. Refused counts puts for which there was not enough memory, and
// puts with invalid contents.
type Counts struct {
	Hits      int64 `json:"hits"`
	Misses    int64 `json:"misses"`
	Puts      int64 `json:"puts"`
	Refused   int64 `json:"refused"`
	Evictions int64 `json:"evictions"`
}

// An entry is a memfd. The table's mu guards all fields except name, label and size.
type entry struct {
	name, label string
	size        int64
	fd          int // -1 before the memory is allocated
	unallocated int64
	users       int
	used        time.Time
	isReady     bool // sealed and checked
	isDropped   bool // no longer in the table
}

// free frees the memory of an entry, which must not be in the table any more. This can take a while.
func (e *entry) free() {
	if e.fd >= 0 {
		_ = unix.Close(e.fd)
	}
}

// A table holds the entries of a store.
type table struct {
	log func(text string)
	// available returns the memory that is left; tests replace it.
	available func() int64
	moving    sync.Mutex // held while an entry is moved to huge pages

	mu      sync.Mutex
	budget  int64
	used    int64
	entries map[string]*entry
	dropped map[*entry]bool // dropped entries that are in use
	counts  Counts
}

func newTable(budget int64, log func(text string)) *table {
	return &table{budget: budget, log: log, available: hostmem.Available, entries: map[string]*entry{},
		dropped: map[*entry]bool{}}
}

// fetch returns a ready entry and a new read-only descriptor of it, or nil. The caller holds the entry until release.
func (t *table) fetch(name string) (*entry, int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entries[name]
	if e == nil || !e.isReady {
		t.counts.Misses++
		return nil, -1, nil
	}
	fd, err := reopen(e.fd)
	if err != nil {
		return nil, -1, err
	}
	t.counts.Hits++
	e.users++
	e.used = time.Now()
	return e, fd, nil
}

// release undoes fetch.
func (t *table) release(e *entry) {
	t.mu.Lock()
	e.users--
	e.used = time.Now()
	isLast := e.isDropped && e.users == 0
	if isLast {
		delete(t.dropped, e)
		t.used -= e.size
	}
	t.mu.Unlock()
	if isLast {
		e.free()
	}
}

// remove removes an entry from the table. The caller holds mu, and frees the entry afterwards.
func (t *table) remove(e *entry) {
	delete(t.entries, e.name)
	e.isDropped = true
	t.used -= e.size
}

// reserve adds an entry that is being written, and evicts unused entries to make room. existing is the entry that
// already has the name. reserve does not allocate memory.
func (t *table) reserve(name, label string, size int64) (e, existing *entry, err error) {
	e = &entry{name: name, label: label, size: size, fd: -1, unallocated: size, used: time.Now()}
	t.mu.Lock()
	var evicted []*entry
	existing = t.entries[name]
	switch {
	case existing != nil:
	case len(t.entries) >= maxEntries:
		err = errs.New(errs.ErrMemory, "the store has %d entries, which is its limit", maxEntries)
	default:
		evicted, err = t.makeRoom(size)
	}
	if err != nil {
		t.counts.Refused++
	} else if existing == nil {
		t.entries[name] = e
		t.used += size
	}
	t.mu.Unlock()
	t.freeEvicted(evicted)
	return e, existing, err
}

// makeRoom removes the least recently used entries that no connection uses, until size bytes fit into the budget
// and into the available memory. If they cannot fit, it removes nothing. The caller holds mu.
func (t *table) makeRoom(size int64) (evicted []*entry, err error) {
	left := t.available() - spare
	for _, e := range t.entries {
		left -= e.unallocated
	}
	overBudget, overMemory := size-(t.budget-t.used), size-left
	var idle []*entry
	for _, e := range t.entries {
		if e.isReady && e.users == 0 {
			idle = append(idle, e)
		}
	}
	slices.SortFunc(idle, func(a, b *entry) int { return a.used.Compare(b.used) })
	freed := int64(0)
	for len(idle) > 0 && freed < max(overBudget, overMemory) {
		freed += idle[0].size
		evicted, idle = append(evicted, idle[0]), idle[1:]
	}
	switch {
	case freed < overBudget:
		return nil, &errs.Memory{Where: "host store", Asked: size, Free: max(0, t.budget-t.used+freed), Total: t.budget,
			Err: "limited by the store's budget and the entries in use"}
	case freed < overMemory:
		return nil, &errs.Memory{Where: "host store", Asked: size, Free: max(0, left+freed), Total: max(0, left+freed),
			Err: "limited by the memory of the machine or control group, and the entries in use"}
	}
	for _, e := range evicted {
		t.remove(e)
		t.counts.Evictions++
	}
	return evicted, nil
}

func (t *table) freeEvicted(evicted []*entry) {
	for _, e := range evicted {
		e.free()
		t.log(fmt.Sprintf("evicted %.12s, %d bytes: %s", e.name, e.size, e.label))
	}
}

// allocate creates the memfd of an entry, allocates all its memory, and fixes its size. So the store is charged for the
// memory instead of the client, and writes cannot fail.
func (t *table) allocate(ctx context.Context, e *entry) error {
	fd, err := unix.MemfdCreate("overwire-host", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_NOEXEC_SEAL)
	if err == unix.EINVAL { // Linux before 6.3
		fd, err = unix.MemfdCreate("overwire-host", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return errs.FromOS(os.NewSyscallError("memfd_create", err))
	}
	t.mu.Lock()
	e.fd = fd
	t.mu.Unlock()
	if err := regular.Again(func() error { return unix.Ftruncate(fd, e.size) }); err != nil {
		return errs.FromOS(os.NewSyscallError("ftruncate", err))
	}
	for off := int64(0); off < e.size; off += step {
		n := min(step, e.size-off)
		if ctx.Err() != nil {
			return errs.Cause(ctx)
		}
		if left := t.available(); left < n+spare/2 {
			return &errs.Memory{Where: "host store", Asked: e.size - off, Free: left, Total: left,
				Err: "another program has taken the memory"}
		}
		if err := regular.Again(func() error { return unix.Fallocate(fd, 0, off, n) }); err != nil {
			return &errs.Memory{Where: "host store", Asked: e.size - off, Free: -1, Total: -1, Err: err.Error()}
		}
		t.mu.Lock()
		e.unallocated -= n
		t.mu.Unlock()
	}
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW)
	return errs.FromOS(os.NewSyscallError("fcntl", err))
}

// seal makes the bytes of an entry unchangeable, checks them, and lets clients fetch it.
func (t *table) seal(ctx context.Context, e *entry, q *request) error {
	if _, err := unix.FcntlInt(uintptr(e.fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_SEAL); err != nil {
		if err == unix.EBUSY {
			return errs.New(errs.ErrArgument, "a process still has the bytes mapped for writing")
		}
		return errs.FromOS(os.NewSyscallError("fcntl", err))
	}
	if err := checkContents(ctx, e.fd, q); err != nil {
		return err
	}
	fd, err := reopen(e.fd)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	_ = unix.Close(e.fd)
	e.fd, e.isReady, e.used = fd, true, time.Now()
	t.counts.Puts++
	return nil
}

// abandon removes an entry that is being written.
func (t *table) abandon(e *entry) {
	t.mu.Lock()
	t.remove(e)
	t.mu.Unlock()
	e.free()
}

// refuse removes an entry with invalid contents.
func (t *table) refuse(e *entry) {
	t.abandon(e)
	t.mu.Lock()
	t.counts.Refused++
	t.mu.Unlock()
}

func (t *table) isReady(e *entry) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return e.isReady
}

// drop removes a name. The memory is freed when no connection uses the entry.
func (t *table) drop(name string) (*entry, error) {
	t.mu.Lock()
	e := t.entries[name]
	if e == nil || !e.isReady {
		t.mu.Unlock()
		if e != nil {
			return nil, errs.New(errs.ErrArgument, "%.12s is being written", name)
		}
		return nil, nil
	}
	isUsed := e.users > 0
	t.remove(e)
	if isUsed {
		t.dropped[e] = true
		t.used += e.size // until the last release
	}
	t.mu.Unlock()
	if !isUsed {
		e.free()
	}
	return e, nil
}

// setBudget changes the budget, and evicts unused entries that no longer fit.
func (t *table) setBudget(budget int64) {
	t.mu.Lock()
	t.budget = budget
	var evicted []*entry
	over := t.used - budget
	byUse := func(a, b *entry) int { return a.used.Compare(b.used) }
	for _, e := range slices.SortedFunc(maps.Values(t.entries), byUse) {
		if over > 0 && e.isReady && e.users == 0 {
			t.remove(e)
			t.counts.Evictions++
			over -= e.size
			evicted = append(evicted, e)
		}
	}
	t.mu.Unlock()
	t.freeEvicted(evicted)
}

// report describes the table, most recently used entries first.
func (t *table) report() *Report {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := &Report{Budget: t.budget, Used: t.used, Available: t.available(), Counts: t.counts, Entries: []Item{}}
	for _, e := range slices.AppendSeq(slices.Collect(maps.Values(t.entries)), maps.Keys(t.dropped)) {
		state := "writing"
		if e.isDropped {
			state = "dropped"
		} else if e.isReady {
			state = "ready"
		}
		r.Entries = append(r.Entries, Item{Name: e.name, Label: e.label, Size: e.size, Users: e.users, Used: e.used,
			State: state})
	}
	slices.SortFunc(r.Entries, func(a, b Item) int { return b.Used.Compare(a.Used) })
	return r
}

// reopen opens a memfd again, for reading only.
func reopen(fd int) (own int, err error) {
	err = regular.Again(func() (err error) {
		own, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		return err
	})
	return own, errs.FromOS(os.NewSyscallError("open", err))
}
