package face

import (
	"encoding/json"
	"errors"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// called runs a verb to its end.
func called(name, text string) (string, error) {
	h, err := Begin(name, text)
	if err != nil {
		return "", err
	}
	if done, err := Wait(h, time.Minute); !done || err != nil {
		Abandon(h)
		return "", err
	}
	return Result(h)
}

func opened(spec string) (uint64, error) {
	text, err := called("open", spec)
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(text, 10, 64)
}

// A result has one receiver; one that nobody receives is freed.
func TestResultIsTakenOnce(t *testing.T) {
	models.mu.Lock()
	before := len(models.all)
	models.mu.Unlock()
	open := spec(t, plain(t, 1000))
	for round := range 50 {
		h, err := Begin("open", open)
		if err != nil {
			t.Fatal(err)
		}
		if round%2 == 0 { // else it is given up wherever it is
			if done, err := Wait(h, time.Minute); !done || err != nil {
				t.Fatal(done, err)
			}
		}
		if round%3 == 0 {
			Free(h)
		} else {
			Abandon(h)
		}
		if _, err := Result(h); !errors.Is(err, fault.ErrArgument) {
			t.Fatal("a result of a call that was given up:", err)
		}
	}
	idle(t)
	models.mu.Lock()
	defer models.mu.Unlock()
	if len(models.all) != before {
		t.Errorf("%d models are open that were %d", len(models.all), before)
	}
}

// A verb that waits for a server that never answers ends when it is given up, and
// leaves neither a connection nor a goroutine.
func TestAbandonedCallsEnd(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	accepted := make(chan net.Conn)
	spawn.Go("silent server", func() {
		for {
			c, err := l.Accept()
			if err != nil {
				close(accepted)
				return
			}
			accepted <- c
		}
	})
	host := "http://" + l.Addr().String()
	for _, c := range []struct{ verb, uri string }{
		{"open", host + "/m.safetensors"}, {"open", host + "/m.safetensors.index.json"}, {"open", host + "/folder/"},
		{"names", host + "/folder/"}, {"inspect", host + "/m.safetensors"}, {"records", host + "/m.tensors"},
	} {
		text, _ := json.Marshal(map[string]any{"uris": []string{c.uri}})
		h, err := Begin(c.verb, string(text))
		if err != nil {
			t.Fatal(err)
		}
		server := <-accepted
		Abandon(h)
		// The server sees the end of its connection: its request, and no more.
		_ = server.SetReadDeadline(time.Now().Add(20 * time.Second))
		for b := make([]byte, 4096); ; {
			if _, err := server.Read(b); err != nil {
				if e, ok := err.(net.Error); ok && e.Timeout() {
					t.Errorf("%s %s: its connection stayed", c.verb, c.uri)
				}
				break
			}
		}
		_ = server.Close()
		if _, err := Wait(h, 0); !errors.Is(err, fault.ErrArgument) {
			t.Errorf("%s: the job is still there: %v", c.verb, err)
		}
	}
	_ = l.Close()
	for range accepted {
	}
	idle(t)
}

func TestCallOfNoVerb(t *testing.T) {
	if _, err := Begin("destroy", "{}"); !errors.Is(err, fault.ErrArgument) {
		t.Error(err)
	}
	if _, err := called("open", "["); !errors.Is(err, fault.ErrArgument) {
		t.Error(err)
	}
}
