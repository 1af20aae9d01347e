package hoststore

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
)

// everyCommand returns a request of each command. put and seal are for a name that the store does not have.
func everyCommand(kept string) []request {
	name := strings.Repeat("b", 64)
	return []request{{Op: opGet, Name: kept}, {Op: opGet, Name: name}, {Op: opPut, Name: name, Size: 1 << 20},
		{Op: opSeal, Name: name}, {Op: opList}, {Op: opBudget, Size: 1 << 30}, {Op: opDrop, Name: name},
		{Op: opDrop, Name: kept}}
}

// If a client ends after sending a command and before reading the reply, the command leaves nothing in the store: no
// use of an entry, no unsealed memory, and no descriptor.
func TestClientsThatEndBeforeTheReply(t *testing.T) {
	container, _ := files(t)
	s := newStore(t, 1<<30)
	l := put(t, dial(t, s), openFile(t, container), "kept")
	before := openDescriptors(t)
	for _, q := range everyCommand(l.name) {
		q.Version = protocol
		conn := raw(t, s)
		if err := sendMessage(conn, &q, -1); err != nil {
			t.Fatal(err)
		}
		_ = conn.Close()
		isDropped := q.Op == opDrop && q.Name == l.name
		report(t, s, func(r *Report) bool {
			if isDropped {
				return r.Used == 0 && len(r.Entries) == 0
			}
			return len(r.Entries) == 1 && r.Entries[0].State == "ready" && r.Entries[0].Users == 0 &&
				r.Used == r.Entries[0].Size
		})
		if !isDropped {
			sameDescriptors(t, before)
		}
	}
}

// If the store is killed while a client waits for the reply to a command, the client gets an error at once.
func TestStoreKilledBeforeTheReply(t *testing.T) {
	container, _ := files(t)
	f := openFile(t, container)
	l, _, _ := labelOf(t.Context(), f)
	before := openDescriptors(t)
	for _, q := range everyCommand(l.name) {
		socket := filepath.Join(t.TempDir(), "s")
		store := child{Socket: socket, Budget: 1 << 30}.start(t, nil)
		if line := store.next(); line != "listening" {
			t.Fatal(line)
		}
		c, err := Dial(t.Context(), socket)
		if err != nil {
			t.Fatal(err)
		}
		if state, err := c.Put(t.Context(), f, func(int64) {}); err != nil || state != "kept" {
			t.Fatal(state, err)
		}
		if err := store.Process.Signal(unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.Wait4(store.Process.Pid, nil, unix.WUNTRACED, nil); err != nil { // until it has stopped
			t.Fatal(err)
		}
		killed := time.AfterFunc(50*time.Millisecond, func() { _ = store.Process.Kill() })
		_, fd, err := c.ask(t.Context(), q, time.Minute)
		if killed.Stop() || fd >= 0 || !errors.Is(err, errs.ErrIO) {
			t.Errorf("%+v: %d, %v", q, fd, err)
		}
		c.Close()
		store.kill()
	}
	sameDescriptors(t, before)
}
