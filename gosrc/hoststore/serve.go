package hoststore

// This file implements the process of a store: its socket and its connections.

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

const (
	maxConnections = 4096
	// prompt is how long the rest of a message, and the delivery of a reply, may take.
	prompt = 5 * time.Second
	// patience is how long a connection that uses no entry may be silent.
	patience = 30 * time.Second
	// slowest is the lowest allowed rate of a put, in bytes per second. A slower client loses its put.
	slowest = 10 << 20
)

// Options are the options of a store. Log gets one line for each change, and may be nil.
type Options struct {
	Socket string // "" means the socket of the user's own store
	Budget int64
	Log    func(text string)
}

// A Store accepts connections at a socket until Close.
type Store struct {
	table    *table
	path     string
	lock     int // the descriptor of the lock file
	listener *net.UnixListener
	ctx      context.Context
	cancel   context.CancelFunc
	done     sync.WaitGroup

	mu    sync.Mutex
	open  map[*net.UnixConn]bool
	close sync.Once
}

// Listen creates the socket of a store and serves it. Only one store can listen at a path. A socket that a killed store
// left behind is replaced.
func Listen(opt Options) (*Store, error) {
	if opt.Log == nil {
		opt.Log = func(string) {}
	}
	path, err := Socket(opt.Socket)
	if err != nil {
		return nil, err
	}
	s := &Store{table: newTable(opt.Budget, opt.Log), path: path, open: map[*net.UnixConn]bool{}}
	if err := makeFolder(filepath.Dir(path)); err != nil {
		return nil, errs.In("host", path, err)
	}
	if s.lock, err = lockSocket(path); err != nil {
		return nil, errs.In("host", path, err)
	}
	if s.listener, err = listenAt(path); err != nil {
		_ = unix.Close(s.lock)
		return nil, errs.In("host", path, err)
	}
	s.ctx, s.cancel = context.WithCancel(spawn.Context())
	spawn.GoFor(&s.done, "host store", s.accept)
	return s, nil
}

// lockSocket takes the lock of a socket, which the kernel releases when the process ends.
func lockSocket(path string) (fd int, err error) {
	err = regular.Again(func() (err error) {
		const flags = unix.O_RDWR | unix.O_CREAT | unix.O_CLOEXEC | unix.O_NOFOLLOW | unix.O_NONBLOCK
		fd, err = unix.Open(path+".lock", flags, 0o600)
		return err
	})
	if err != nil {
		return -1, errs.FromOS(&os.PathError{Op: "open", Path: path + ".lock", Err: err})
	}
	var st unix.Stat_t
	if err = regular.Again(func() error { return unix.Fstat(fd, &st) }); err == nil {
		if err = regular.Check(&st); err == nil && st.Uid != uint32(os.Geteuid()) {
			err = errs.New(errs.ErrPermission, "%s.lock belongs to user %d", path, st.Uid)
		}
	}
	if err == nil {
		err = regular.Again(func() error { return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) })
		if err == unix.EWOULDBLOCK {
			err = errs.New(errs.ErrArgument, "another store is running at this socket")
		}
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, errs.FromOS(err)
	}
	return fd, nil
}

// listenAt creates a socket that only this user can connect to. The caller holds its lock.
func listenAt(path string) (*net.UnixListener, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err == nil {
		if st.Mode&unix.S_IFMT != unix.S_IFSOCK || st.Uid != uint32(os.Geteuid()) {
			return nil, errs.New(errs.ErrPermission, "this path is not a socket of this user: remove it, or "+
				"choose another path")
		}
		if err := unix.Unlink(path); err != nil {
			return nil, errs.FromOS(os.NewSyscallError("unlink", err))
		}
	}
	if len(path) > 107 {
		return nil, errs.New(errs.ErrArgument, "the path of a socket may have at most 107 bytes, but this one has %d: "+
			"choose a shorter path", len(path))
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, errs.FromOS(os.NewSyscallError("socket", err))
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return nil, errs.FromOS(os.NewSyscallError("bind", err))
	}
	// No process can connect before Listen.
	if err = unix.Chmod(path, 0o700); err == nil {
		err = unix.Listen(fd, 256)
	}
	var l net.Listener
	if err == nil {
		l, err = net.FileListener(f)
	}
	if err != nil {
		_ = unix.Unlink(path)
		return nil, errs.FromOS(err)
	}
	return l.(*net.UnixListener), nil
}

// Path returns the path of the socket.
func (s *Store) Path() string { return s.path }

// Close ends the store and all connections, and frees its memory. Clients keep the bytes that they have fetched.
func (s *Store) Close() {
	s.close.Do(func() {
		s.cancel()
		_ = unix.Unlink(s.path)
		_ = s.listener.Close()
		s.mu.Lock()
		for conn := range s.open {
			_ = conn.Close()
		}
		s.mu.Unlock()
		s.done.Wait()
		for _, e := range s.table.entries {
			e.free()
		}
		_ = unix.Close(s.lock)
	})
}

// Wait serves until ctx ends.
func (s *Store) Wait(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-s.ctx.Done(): // after a panic
	}
	s.Close()
}

func (s *Store) accept() {
	for {
		conn, err := s.listener.AcceptUnix()
		if s.ctx.Err() != nil {
			if err == nil {
				_ = conn.Close()
			}
			return
		}
		if err != nil { // for example, too many open files
			time.Sleep(50 * time.Millisecond)
			continue
		}
		s.mu.Lock()
		isFull := len(s.open) >= maxConnections
		if !isFull {
			s.open[conn] = true
		}
		s.mu.Unlock()
		if isFull {
			_ = conn.Close()
			continue
		}
		spawn.GoFor(&s.done, "host store", func() { s.attend(conn) })
	}
}

// A session is one connection and the entries that it uses.
type session struct {
	store   *Store
	conn    *net.UnixConn
	uses    map[*entry]bool
	writing *entry // the put that is not sealed yet
}

// attend serves a connection until it ends.
func (s *Store) attend(conn *net.UnixConn) {
	c := &session{store: s, conn: conn, uses: map[*entry]bool{}}
	defer c.end()
	if err := refuseOthers(conn); err != nil {
		c.answer(refusal(err), -1)
		return
	}
	for {
		_ = conn.SetReadDeadline(c.deadline())
		frame, err := readFrame(conn, conn, maxRequest, prompt)
		if s.ctx.Err() != nil {
			return
		}
		var q request
		if err == nil {
			q, err = parseRequest(frame)
		}
		if err != nil {
			if errs.Classed(err) {
				c.answer(refusal(err), -1)
			}
			return
		}
		r, fd, err := c.run(&q)
		if err != nil {
			r, fd = refusal(err), -1
		}
		isSent := c.answer(r, fd)
		if fd >= 0 {
			_ = unix.Close(fd)
		}
		if !isSent {
			return
		}
	}
}

// deadline returns the time by which the next message has to arrive; the zero time means that there is no limit.
func (c *session) deadline() time.Time {
	switch {
	case c.writing != nil:
		return time.Now().Add(time.Minute + time.Duration(c.writing.size/slowest)*time.Second)
	case len(c.uses) > 0:
		return time.Time{}
	}
	return time.Now().Add(patience)
}

func (c *session) answer(r reply, fd int) bool {
	_ = c.conn.SetWriteDeadline(time.Now().Add(prompt))
	return sendMessage(c.conn, r, fd) == nil
}

// end closes the connection and releases what it uses.
func (c *session) end() {
	s := c.store
	_ = c.conn.Close()
	s.mu.Lock()
	delete(s.open, c.conn)
	s.mu.Unlock()
	for e := range c.uses {
		s.table.release(e)
	}
	if c.writing != nil {
		s.table.abandon(c.writing)
		s.table.log(fmt.Sprintf("abandoned %.12s: its client has ended: %s", c.writing.name, c.writing.label))
	}
}

// run executes a command. The caller closes the descriptor, which is -1 if there is none.
func (c *session) run(q *request) (r reply, fd int, err error) {
	t := c.store.table
	switch q.Op {
	case opGet:
		e, fd, err := t.fetch(q.Name)
		if err != nil || e == nil {
			return reply{}, -1, err
		}
		if c.uses[e] {
			t.release(e)
		}
		c.uses[e] = true
		return reply{Found: true, Size: e.size}, fd, nil
	case opPut:
		return c.put(q)
	case opSeal:
		return reply{}, -1, c.seal(q)
	case opDrop:
		e, err := t.drop(q.Name)
		if err != nil || e == nil {
			return reply{}, -1, err
		}
		t.log(fmt.Sprintf("dropped %.12s, %d bytes: %s", e.name, e.size, e.label))
		return reply{Found: true, Size: e.size}, -1, nil
	case opBudget:
		if q.Size > 0 {
			t.setBudget(q.Size)
		}
	}
	report := t.report()
	report.Socket = c.store.path
	return reply{Report: report}, -1, nil
}

// put returns a writable descriptor for a new entry.
func (c *session) put(q *request) (reply, int, error) {
	if c.writing != nil {
		return reply{}, -1, errs.New(errs.ErrArgument, "this connection has a put that is not sealed yet")
	}
	t := c.store.table
	e, existing, err := t.reserve(q.Name, errs.OneLine(q.Label), q.Size)
	if err != nil {
		t.log(fmt.Sprintf("refused %.12s: %s: %s", q.Name, errs.Message(err), errs.OneLine(q.Label)))
		return reply{}, -1, err
	}
	if existing != nil {
		return reply{Found: true, Writing: !t.isReady(existing)}, -1, nil
	}
	err = t.allocate(c.store.ctx, e)
	fd := -1
	if err == nil {
		if fd, err = unix.FcntlInt(uintptr(e.fd), unix.F_DUPFD_CLOEXEC, 3); err != nil {
			err = errs.FromOS(os.NewSyscallError("fcntl", err))
		}
	}
	if err != nil {
		t.abandon(e)
		return reply{}, -1, err
	}
	c.writing = e
	return reply{Size: e.size}, fd, nil
}

// seal ends the put of this connection. After an error, the entry is gone.
func (c *session) seal(q *request) error {
	e, t := c.writing, c.store.table
	if e == nil || e.name != q.Name {
		return errs.New(errs.ErrArgument, "this connection has no unsealed put of %.12s", q.Name)
	}
	c.writing = nil
	if err := t.seal(c.store.ctx, e, q); err != nil {
		t.refuse(e)
		t.log(fmt.Sprintf("refused %.12s: %s: %s", e.name, errs.Message(err), e.label))
		return err
	}
	t.log(fmt.Sprintf("kept %.12s, %d bytes: %s", e.name, e.size, e.label))
	spawn.GoFor(&c.store.done, "host store", func() { useHugePages(c.store.ctx, t, e) })
	return nil
}
