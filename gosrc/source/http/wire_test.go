package http

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/source"
)

// A wire counts the bytes that the kernel has received for a client, including TLS, headers and unread bytes.
type wire struct {
	client     *client
	came, open atomic.Int64
}

// watch creates the client for these options before a source does.
func watch(t *testing.T, opt source.Options) *wire {
	t.Helper()
	c, err := holdClient(opt)
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{client: c}
	dial := c.transport.DialContext
	c.transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		w.open.Add(1)
		return &counted{TCPConn: c.(*net.TCPConn), w: w}, nil
	}
	return w
}

// close releases the client, waits until its connections have ended, and returns the number of bytes received.
func (w *wire) close(t *testing.T) int64 {
	t.Helper()
	w.client.dropClient()
	for range 6000 {
		if w.open.Load() == 0 {
			return w.came.Load()
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("%d connections are left", w.open.Load())
	return w.came.Load()
}

type counted struct {
	*net.TCPConn
	w    *wire
	once sync.Once
}

func (c *counted) Close() error {
	c.once.Do(func() {
		if raw, err := c.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) {
				if i, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
					c.w.came.Add(int64(i.Bytes_received))
				}
			})
		}
		c.w.open.Add(-1)
	})
	return c.TCPConn.Close()
}
