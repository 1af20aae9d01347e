package peers

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
)

// joined returns joined Peers of several ranks, all in this process.
func joined(t *testing.T, ranks int) []*Peers {
	t.Helper()
	all := make([]*Peers, ranks)
	offers := make([]Offer, ranks)
	for rank := range all {
		p, err := New(nil, 8192, rank, ranks)
		if err != nil {
			t.Fatal(err)
		}
		all[rank], offers[rank] = p, p.Offer()
	}
	for _, p := range all {
		if err := p.Join(offers); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// together returns joined Peers that have mapped each other's memory.
func together(t *testing.T, ranks int) []*Peers {
	t.Helper()
	all := joined(t, ranks)
	for rank, p := range all {
		for other := range all {
			if other == rank {
				continue
			}
			if err := p.MapMemoryOf(other); err != nil {
				t.Fatal(err)
			}
		}
	}
	return all
}

// over ends all Peers in parallel.
func over(t *testing.T, all []*Peers) {
	t.Helper()
	ended := make(chan error)
	for _, p := range all {
		go func() {
			err := p.End(t.Context(), true)
			p.Close()
			ended <- err
		}()
	}
	for range all {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// Other processes can read what a process has written and published. A piece counts as taken when all of them have
// released it.
func TestPublishAndRelease(t *testing.T) {
	all := together(t, 3)
	for from, p := range all {
		unsafe.Slice((*byte)(p.Memory(from)), 8192)[8191] = byte(from + 1)
		p.Board.Publish(1)
	}
	for _, p := range all {
		for from := range all {
			if n := p.Board.CountPublished(from); n != 1 {
				t.Fatalf("rank %d has published %d pieces", from, n)
			}
			if got := unsafe.Slice((*byte)(p.Memory(from)), 8192)[8191]; got != byte(from+1) {
				t.Errorf("the memory of rank %d contains %d", from, got)
			}
		}
	}
	all[1].Board.ReleasePieces(0, 1)
	all[2].Board.ReleasePieces(1, 1) // memory of another rank
	if n := all[0].Board.CountTaken(); n != 0 {
		t.Errorf("%d pieces are taken, but only rank 1 has released any", n)
	}
	all[2].Board.ReleasePieces(0, 2)
	if n := all[0].Board.CountTaken(); n != 1 {
		t.Errorf("%d pieces are taken, want 1", n)
	}
	over(t, all)
}

// Processes that meet at a step see each other's values, even if one comes late. If a process has failed, has closed or
// does not come, the others notice.
func TestProcessesMeet(t *testing.T) {
	all := together(t, 3)
	type seen struct {
		values []uint32
		err    error
	}
	for step := uint32(1); step <= 5; step++ {
		soon, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
		if values, err := all[0].Board.MeetAt(soon, step, 10+step); len(values) != 1 || err != nil {
			t.Errorf("step %d: before the others, rank 0 sees %v, %v", step, values, err)
		}
		cancel()
		met := make(chan seen)
		for rank, p := range all {
			go func() {
				values, err := p.Board.MeetAt(t.Context(), step, uint32(10*(rank+1))+step)
				met <- seen{values, err}
			}()
		}
		for range all {
			want := []uint32{10 + step, 20 + step, 30 + step}
			if one := <-met; one.err != nil || !slices.Equal(one.values, want) {
				t.Errorf("step %d: %v, %v, want %v", step, one.values, one.err, want)
			}
		}
	}
	if err := all[1].End(t.Context(), false); err == nil {
		t.Error("the others have ended too early")
	}
	if _, err := all[0].Board.MeetAt(t.Context(), 6, 1); !errors.Is(err, ErrOther) {
		t.Error(err)
	}
	over(t, []*Peers{all[0], all[2]})
	all[1].Close()

	all = together(t, 2)
	ended := make(chan error)
	go func() { ended <- all[1].End(t.Context(), true) }()
	_, err := all[0].Board.MeetAt(t.Context(), 1, 1)
	if err == nil || !strings.Contains(err.Error(), "rank 1 of this host has closed") {
		t.Error(err)
	}
	over(t, all[:1])
	if err := <-ended; err != nil {
		t.Error(err)
	}
	all[1].Close()
}

// A waiting process is woken by the event, not only by its next poll.
func TestEventWakesAWait(t *testing.T) {
	usual := lifeEvery
	lifeEvery = time.Hour
	defer func() { lifeEvery = usual }()
	all := together(t, 2)
	woken := make(chan error)
	for name, step := range map[string]struct {
		wait func() error
		then func()
	}{
		"turn": {func() error { return all[1].Board.AwaitMapTurn(t.Context()) }, func() { all[0].Board.EndMapTurn() }},
	} {
		go func() { woken <- step.wait() }()
		time.Sleep(20 * time.Millisecond) // most likely it is waiting by then
		step.then()
		if err := <-woken; err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	all = append(all, together(t, 2)...)
	go func() { woken <- all[3].Board.AwaitMapTurn(t.Context()) }()
	time.Sleep(20 * time.Millisecond)
	all[2].Board.ReportFailure()
	if err := <-woken; !errors.Is(err, ErrOther) {
		t.Error(err)
	}
	over(t, all[:2])
	over(t, all[2:])
}

// A failure of one process ends the waits of all others with a typed error.
func TestFailureEndsAllWaits(t *testing.T) {
	all := together(t, 3)
	all[2].Board.ReportFailure()
	for _, p := range all[:2] {
		if err := p.Board.CheckOthers(); !errors.Is(err, ErrOther) || !errors.Is(err, errs.ErrIO) {
			t.Error(err)
		}
	}
	over(t, all)
}

// A process that hangs is considered gone, and the others end.
func TestHangingProcess(t *testing.T) {
	usual := silence
	silence = 300 * time.Millisecond
	defer func() { silence = usual }()
	all := together(t, 2)
	close(all[1].Board.stop) // it lives, but sends no heartbeats
	all[1].Board.beat.Wait()
	err := all[0].Board.CheckOthers()
	for deadline := time.Now().Add(time.Minute); err == nil && time.Now().Before(deadline); {
		err = all[0].Board.CheckOthers()
	}
	if !errors.Is(err, errs.ErrIO) || errors.Is(err, ErrOther) || len(all[0].Board.Lost()) != 1 {
		t.Errorf("%v, lost %v", err, all[0].Board.Lost())
	}
	if err := all[0].End(t.Context(), true); err == nil {
		t.Error("End returned no error")
	}
	all[0].Close()
	all[1].Board.stop = make(chan struct{})
	all[1].Close()
}

// Memory may be called while another goroutine maps the memory: it returns nil or the final address. The race
// detector checks this.
func TestMemoryWhileItIsMapped(t *testing.T) {
	all := joined(t, 2)
	seen := make(chan unsafe.Pointer)
	for rank, p := range all {
		go func() {
			at := p.Memory(1 - rank)
			for ; at == nil; at = p.Memory(1 - rank) {
				runtime.Gosched()
			}
			seen <- at
		}()
		if err := p.MapMemoryOf(1 - rank); err != nil {
			t.Fatal(err)
		}
		if at := <-seen; at != p.Memory(1-rank) {
			t.Errorf("rank %d: Memory returned %p and %p", rank, at, p.Memory(1-rank))
		}
	}
	over(t, all)
}

// A cancelled process does not wait for an idle one. Its memory is released when the idle process has ended.
func TestStoppedEndsSoon(t *testing.T) {
	all := together(t, 2)
	memory := uintptr(all[0].file.raw)
	cause := errors.New("cancelled")
	ctx, stop := context.WithCancelCause(t.Context())
	ended := make(chan error)
	go func() {
		err := all[0].End(ctx, true)
		all[0].Close()
		ended <- err
	}()
	stop(cause)
	if err := <-ended; !errors.Is(err, cause) {
		t.Error(err)
	}
	if !isShared(t, memory) {
		t.Error("memory that another process may read was freed")
	}
	if err := all[1].End(t.Context(), false); err != nil {
		t.Error(err)
	}
	all[1].Close()
	if left := spawntest.Left(); len(left) > 0 {
		t.Error(left)
	}
	if isShared(t, memory) {
		t.Error("the memory was not freed")
	}
}

// isShared reports whether shared memory is mapped at an address. It asks the system, because another goroutine
// may be freeing the memory.
func isShared(t *testing.T, at uintptr) bool {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(maps)) {
		if strings.HasPrefix(line, fmt.Sprintf("%x-", at)) && strings.Contains(line, "memfd:overwire") {
			return true
		}
	}
	return false
}

// A killed process is detected immediately, before its parent has waited for it.
func TestKilled(t *testing.T) {
	child := exec.Command("sleep", "60")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	p, err := watchProcess(child.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	if !p.isAlive() {
		t.Error("a running process counts as ended")
	}
	_ = child.Process.Kill()
	for deadline := time.Now().Add(time.Minute); p.isAlive(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("a killed process counts as running")
		}
	}
	_ = child.Wait()
	if p.isAlive() {
		t.Error("a process that has ended counts as running")
	}
}

// An offer is refused if its descriptor refers to something else.
func TestForeignDescriptors(t *testing.T) {
	a, err := New(nil, 4096, 0, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	b, err := New(nil, 4096, 1, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	for name, change := range map[string]func(o *Offer){
		"another file": func(o *Offer) { o.Flags = a.Offer().File },
		"no file":      func(o *Offer) { o.Flags = 0 },
		"no process":   func(o *Offer) { o.Process = 1 << 30 },
		"token":        func(o *Offer) { o.Token = b.Offer().Token },
	} {
		o := a.Offer()
		change(&o)
		if err := b.Join([]Offer{o, b.Offer()}); !errors.Is(err, errs.ErrNotSupported) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, offers := range map[string][]Offer{
		"few": {a.Offer()}, "order": {b.Offer(), a.Offer()}, "own": {a.Offer(), {Rank: 1, File: 3, Bytes: 4096}},
		"bytes": {{Bytes: 1}, b.Offer()},
	} {
		if err := b.Join(offers); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := New(nil, 4096, 2, 2); !errors.Is(err, errs.ErrArgument) {
		t.Error(err)
	}
}

// Memory shared by processes cannot change its size, even for a process that has it open. Memory that could
// shrink is refused.
func TestSharedMemoryKeepsItsSize(t *testing.T) {
	token := bytes.Repeat([]byte{7}, tokenBytes)
	s, err := newShared(8192, token)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	for _, size := range []int64{0, pageBytes, 1 << 20} {
		if err := unix.Ftruncate(s.fd, size); !errors.Is(err, unix.EPERM) {
			t.Errorf("changed its size to %d bytes: %v", size, err)
		}
	}
	own := &Offer{Process: pid(), Token: hex.EncodeToString(token)}
	again, err := openShared(own, s.fd, 8192)
	if err != nil {
		t.Fatal(err)
	}
	again.close()
	fd, err := unix.MemfdCreate("other", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	_, _ = unix.Pwrite(fd, token, 0)
	_ = unix.Ftruncate(fd, pageBytes+8192)
	if _, err = openShared(own, fd, 8192); !errors.Is(err, errs.ErrNotSupported) ||
		!strings.Contains(err.Error(), "its size can change") {
		t.Error(err)
	}
}
