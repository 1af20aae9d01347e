package binding

// This file starts the runtime's poller early, when a failure can still be reported as an error.

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
)

// startPoller makes Go's runtime start its poller, which waits for files, sockets and timers. If the process has no
// descriptors left, the runtime would end the process, so startPoller first tries the same calls. Another thread may
// still take the last descriptors in between.
func startPoller() error {
	err := tryPoller()
	if errors.Is(err, unix.EMFILE) {
		err = errs.New(errs.ErrIO, "%v: the engine needs two file descriptors: close files, or raise `ulimit -n`", err)
	}
	if err != nil {
		return errs.Place("start", "the engine", "", -1, errs.FromOS(err))
	}
	time.AfterFunc(time.Hour, func() {}).Stop() // the first timer starts the poller
	return nil
}

// tryPoller makes the calls that would end the process if they failed in the runtime.
func tryPoller() error {
	poller, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(poller)
	event, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return err
	}
	defer unix.Close(event)
	return unix.EpollCtl(poller, unix.EPOLL_CTL_ADD, event, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(event)})
}
