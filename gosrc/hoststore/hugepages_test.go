package hoststore

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The bytes of an entry stay the same in huge pages. A dropped entry is not moved.
func TestHugePages(t *testing.T) {
	tab := newStore(t, 1<<30).table
	e, _, err := tab.reserve(strings.Repeat("a", 64), "", 4*hugePage+5)
	if err == nil {
		err = tab.allocate(t.Context(), e)
	}
	if err != nil {
		t.Fatal(err)
	}
	seed := uint64(time.Now().UnixNano())
	want, got := make([]byte, e.size), make([]byte, e.size)
	rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)}).Read(want)
	if _, err := unix.Pwrite(e.fd, want, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(uintptr(e.fd), unix.F_ADD_SEALS, seals); err != nil {
		t.Fatal(err)
	}
	moved := useHugePages(t.Context(), tab, e)
	if _, err := unix.Pread(e.fd, got, 0); err != nil || !bytes.Equal(got, want) {
		t.Error("the bytes have changed", err)
	}
	if err := movePage(e.fd, 0); err == unix.EINVAL {
		t.Skip("this kernel moves no memfd to huge pages")
	} else if err == nil && moved != 4*hugePage {
		t.Errorf("%d bytes were moved, seed %d", moved, seed)
	}
	tab.abandon(e)
	if moved := useHugePages(t.Context(), tab, e); moved != 0 {
		t.Errorf("%d bytes of a dropped entry were moved", moved)
	}
}
