package hoststore

// This file implements a connection to a store.

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/file"
)

// quick is how long a store may take to answer a command that moves no bytes.
const quick = 2 * time.Second

// A Client is a connection to a store. Entries that it has fetched are in use until Close. After a failure of the
// connection, all commands fail. A Client is safe for concurrent use, and runs one command at a time.
type Client struct {
	mu   sync.Mutex
	conn *net.UnixConn
}

// Dial connects to the store at a socket; see Socket for the path.
func Dial(ctx context.Context, path string) (*Client, error) {
	path, err := Socket(path)
	if err != nil {
		return nil, err
	}
	d := net.Dialer{Timeout: quick}
	conn, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		if ctx.Err() != nil {
			return nil, errs.Cause(ctx)
		}
		if no, ok := errors.AsType[unix.Errno](err); ok {
			err = no // without the text of package net, which repeats the path
		}
		if err == unix.ECONNREFUSED {
			err = unix.ENOENT // a killed store left its socket behind
		}
		return nil, errs.In("host", path, errs.FromOS(&os.PathError{Op: "connect", Path: path, Err: err}))
	}
	c := &Client{conn: conn.(*net.UnixConn)}
	if err := refuseOthers(c.conn); err != nil {
		c.Close()
		return nil, errs.In("host", path, err)
	}
	return c, nil
}

// Close ends the connection. It does not wait for a command that is running, which then fails.
func (c *Client) Close() { _ = c.conn.Close() }

// ask sends a request and returns the reply, and the descriptor that it carries, or -1.
func (c *Client) ask(ctx context.Context, q request, most time.Duration) (r reply, fd int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	q.Version = protocol
	if err := c.conn.SetDeadline(time.Now().Add(most)); err != nil {
		return r, -1, errs.New(errs.ErrIO, "the connection is closed")
	}
	stop := context.AfterFunc(ctx, c.Close)
	defer stop()
	in := &inlet{conn: c.conn}
	frame, err := []byte(nil), sendMessage(c.conn, &q, -1)
	if err == nil {
		frame, err = readFrame(in, c.conn, maxReply, most)
	}
	fd = in.take()
	if err == nil {
		r, err = parseReply(frame)
	}
	switch {
	case ctx.Err() != nil:
		err = errs.Cause(ctx)
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = errs.New(errs.ErrTimeout, "the store did not answer within %v", most)
	case err != nil && !errs.Classed(err):
		err = errs.New(errs.ErrIO, "the connection to the store broke: %v", err)
	case err == nil && r.Error != "":
		if fd >= 0 {
			_ = unix.Close(fd)
		}
		return r, -1, &refusalError{errs.New(classOf(r.Class), "%s", errs.OneLine(r.Error))}
	}
	if err != nil { // otherwise the next request could get the late reply
		c.Close()
		if fd >= 0 {
			_ = unix.Close(fd)
		}
		return reply{}, -1, err
	}
	return r, fd, nil
}

// askText is like ask, for a command that returns no descriptor.
func (c *Client) askText(ctx context.Context, q request, most time.Duration) (reply, error) {
	r, fd, err := c.ask(ctx, q, most)
	if fd >= 0 {
		_ = unix.Close(fd)
	}
	return r, err
}

// refusalError is the error of a command that a working store refused.
type refusalError struct{ error }

func (r *refusalError) Unwrap() error { return r.error }

// fetch returns a source of the bytes with a name, or nil if the store does not have them. uri names the source in
// errors. It accepts only a descriptor with bytes that cannot change and that begin with what front names.
func (c *Client) fetch(ctx context.Context, name string, front label, size int64, uri string) (source.Source, error) {
	r, fd, err := c.ask(ctx, request{Op: opGet, Name: name}, quick)
	if err != nil {
		return nil, err
	}
	if fd < 0 {
		if r.Found {
			return nil, errs.New(errs.ErrIO, "the store sent no descriptor")
		}
		return nil, nil
	}
	defer unix.Close(fd)
	has, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || has&seals != seals {
		return nil, errs.New(errs.ErrCorrupt, "the store sent a descriptor that is not sealed")
	}
	src, err := file.FromFD(fd, uri)
	if err != nil {
		return nil, err
	}
	if src.Size() != size {
		err = errs.New(errs.ErrCorrupt, "the store sent %d bytes instead of %d", src.Size(), size)
	} else {
		err = compareName(ctx, src, front)
	}
	if err != nil {
		_ = src.Close()
		return nil, err
	}
	return src, nil
}

// Drop removes a name from the store. size is the number of bytes; -1 means that there was no such name.
func (c *Client) Drop(ctx context.Context, name string) (size int64, err error) {
	r, err := c.askText(ctx, request{Op: opDrop, Name: name}, time.Minute)
	if err != nil || !r.Found {
		return -1, err
	}
	return r.Size, nil
}

// Budget returns a report of the store. If budget is above 0, it first changes the store's budget.
func (c *Client) Budget(ctx context.Context, budget int64) (Report, error) {
	r, err := c.askText(ctx, request{Op: opBudget, Size: budget}, time.Minute)
	if err == nil && r.Report == nil {
		err = errs.New(errs.ErrIO, "the store sent no report")
	}
	if err != nil {
		return Report{}, err
	}
	return *r.Report, nil
}

// Put copies a file into the store under its name. It returns "kept" if it has done so, "present" if the store already
// had the file, and "writing" if another client is putting it. It returns "unnamed" if the file cannot have a name:
// because it is not safetensors, or because it is plain and was changed a moment ago or has no identity. Several
// goroutines call done with the number of bytes that each has just copied.
func (c *Client) Put(ctx context.Context, src source.Source, done func(n int64)) (state string, err error) {
	return c.putPaced(ctx, src, done, nil)
}

func (c *Client) putPaced(ctx context.Context, src source.Source, done func(n int64), p *pace) (state string,
	err error) {
	l, ok, err := labelOf(ctx, src)
	if err != nil || !ok {
		return "unnamed", err
	}
	return c.putAs(ctx, src, l, done, p)
}

// putAs is like Put for bytes that have a name.
func (c *Client) putAs(ctx context.Context, src source.Source, l label, done func(n int64), p *pace) (state string,
	err error) {
	shown := errs.OneLine(errs.RedactURI(src.URI()))
	long := time.Minute + time.Duration(src.Size()/(100<<20))*time.Second
	isAhead, err := p.awaitCore()
	if err != nil {
		return "", err
	}
	r, fd, err := c.ask(ctx, request{Op: opPut, Name: l.name, Size: src.Size(),
		Label: shown[max(0, len(shown)-maxText):]}, long)
	if err != nil {
		return "", err
	}
	if fd < 0 {
		if r.Writing {
			return "writing", nil
		}
		return "present", nil
	}
	if f := src.Facts().File; f != nil && !isAhead {
		f.Expect(src.Size(), true, "auto") // do not fill the page cache with a second copy
	}
	sum, err := copyInto(ctx, fd, src, done, p)
	_ = unix.Close(fd)
	if err == nil {
		err = source.Unwritten(src)
	}
	if err != nil {
		c.Close() // the store then frees the memory
		return "", err
	}
	q := request{Op: opSeal, Name: l.name, Identity: l.identity}
	if l.identity != "" {
		q.Sum = sum
	}
	_, err = c.askText(ctx, q, long)
	return "kept", err
}
