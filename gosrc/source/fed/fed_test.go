package fed_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/fed"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

const pieceBytes = 1 << 20

// A store serves one object and counts its bytes.
type store struct {
	*httptest.Server
	sent atomic.Int64
}

type counted struct {
	http.ResponseWriter
	s *store
}

func (c counted) Write(p []byte) (int, error) {
	c.s.sent.Add(int64(len(p))) // before the client may have the bytes
	return c.ResponseWriter.Write(p)
}

func serve(t *testing.T, data []byte) *store {
	s := &store{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("ETag", fmt.Sprintf(`"%x"`, crc32.ChecksumIEEE(data)))
		http.ServeContent(counted{w, s}, r, "", time.Time{}, bytes.NewReader(data))
	}))
	t.Cleanup(s.Close)
	return s
}

// A supplier answers the events of a feed until the test ends.
type supplier struct {
	feed *fed.Feed
	mu   sync.Mutex
	seen []fed.Event
	done chan struct{}
}

// supply makes a feed. answer gets each question and the feed; nil answers nothing.
func supply(t *testing.T, answer func(f *fed.Feed, e fed.Event)) *supplier {
	t.Helper()
	f, err := fed.New(pieceBytes, 4)
	if err != nil {
		t.Fatal(err)
	}
	s := &supplier{feed: f, done: make(chan struct{})}
	fed.Use(f)
	spawn.Go("test", func() {
		defer close(s.done)
		for {
			events, err := f.Next(context.Background(), time.Minute)
			if err != nil {
				return
			}
			s.mu.Lock()
			s.seen = append(s.seen, events...)
			s.mu.Unlock()
			for _, e := range events {
				if e.What == fed.Ask && answer != nil {
					answer(f, e)
				}
			}
		}
	})
	t.Cleanup(func() {
		fed.Use(nil)
		<-s.done
	})
	return s
}

// count returns how many events of a kind there were. It waits up to a minute until there are at least n.
func (s *supplier) count(what string, n int) (found int) {
	for range 6000 {
		s.mu.Lock()
		found = 0
		for _, e := range s.seen {
			if e.What == what {
				found++
			}
		}
		s.mu.Unlock()
		if found >= n {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	return found
}

func piece(data []byte, e fed.Event) []byte {
	return slices.Clone(data[e.Piece*pieceBytes : e.Piece*pieceBytes+e.Bytes])
}

func sums(b []byte) (all []uint32) {
	for part := range slices.Chunk(b, fed.Block) {
		all = append(all, crc32.Checksum(part, crc32.MakeTable(crc32.Castagnoli)))
	}
	return all
}

// shared answers every question with the piece.
func shared(data []byte) func(f *fed.Feed, e fed.Event) {
	return func(f *fed.Feed, e fed.Event) {
		b := piece(data, e)
		_, _ = f.Answer(e.File, e.Piece, b, sums(b))
	}
}

func fedSource(t *testing.T, url string) source.Source {
	t.Helper()
	src, err := open.With(source.Options{Fed: true}).Open(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = src.Close() })
	return src
}

func random(n int) []byte {
	data := make([]byte, n)
	r := rand.NewChaCha8([32]byte{1})
	_, _ = r.Read(data)
	return data
}

func readAll(t *testing.T, src source.Source, want []byte) {
	t.Helper()
	got := make([]byte, len(want))
	if err := src.ReadAt(t.Context(), got, 0); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%v, or wrong bytes", err)
	}
}

// A fed source passes the common suite: with pieces in memory, with pieces that have to be read from the store, and
// with both in turn.
func TestSuite(t *testing.T) {
	for name, inMemory := range map[string]func(n int64) bool{
		"memory": func(int64) bool { return true }, "store": func(int64) bool { return false },
		"both": func(n int64) bool { return n%2 == 0 },
	} {
		t.Run(name, func(t *testing.T) {
			is := sourcetest.Is{Remote: true, Stepped: true, Known: true}
			sourcetest.Suite(t, is, func(t *testing.T, data []byte) source.Source {
				supply(t, func(f *fed.Feed, e fed.Event) {
					if inMemory(e.File) {
						shared(data)(f, e)
					} else {
						_, _ = f.Answer(e.File, e.Piece, nil, nil)
					}
				})
				return fedSource(t, serve(t, data).URL)
			})
		})
	}
}

// Pieces in memory cause no request to the store, whether they are read by offset or as ranges. Each piece is freed
// once it was read completely.
func TestNoRequests(t *testing.T) {
	data := random(5*pieceBytes + 12345)
	s, from := supply(t, shared(data)), serve(t, data)
	src := fedSource(t, from.URL)
	before := from.sent.Load()
	readAll(t, src, data)
	if n := s.count(fed.Free, 6); n != 6 {
		t.Errorf("%d pieces were freed", n)
	}
	r, err := sourcetest.Begin(t.Context(), src.Facts().Ranges, 10, 3*pieceBytes)
	if err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 3*pieceBytes)
	for part := range slices.Chunk(got, 77_777) {
		if err := r.Next(part); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(got, data[10:10+3*pieceBytes]) || r.Close() != nil {
		t.Error("wrong bytes")
	}
	if n := from.sent.Load() - before; n != 0 {
		t.Errorf("the store sent %d bytes", n)
	}
	if err := src.Close(); err != nil || s.count(fed.Close, 1) != 1 {
		t.Error(err)
	}
}

// A piece with a wrong checksum is reported once and read from the store. Its intact blocks may have been used.
func TestBadPiece(t *testing.T) {
	data := random(3 * pieceBytes)
	for _, damage := range []func(b []byte) ([]byte, []uint32){
		func(b []byte) ([]byte, []uint32) { c := sums(b); b[len(b)/2] ^= 1; return b, c },
		func(b []byte) ([]byte, []uint32) { return b[:len(b)-1], sums(b) },
		func(b []byte) ([]byte, []uint32) { return b, append(sums(b), 0) },
	} {
		s := supply(t, func(f *fed.Feed, e fed.Event) {
			b, c := piece(data, e), sums(piece(data, e))
			if e.Piece == 1 {
				b, c = damage(b)
			}
			_, _ = f.Answer(e.File, e.Piece, b, c)
		})
		src := fedSource(t, serve(t, data).URL)
		for range 2 {
			readAll(t, src, data)
		}
		if n := s.count(fed.Bad, 1); n != 1 {
			t.Errorf("%d bad pieces", n)
		}
	}
}

// A source whose supplier never answers reads its store. After two late pieces it no longer asks.
func TestLate(t *testing.T) {
	data := random(6 * pieceBytes)
	s := supply(t, nil)
	src := fedSource(t, serve(t, data).URL)
	readAll(t, src, data)
	if late, asked := s.count(fed.Late, 2), s.count(fed.Ask, 1); late != 2 || s.count(fed.Alone, 1) != 1 {
		t.Errorf("%d of %d pieces were late", late, asked)
	}
}

// An object that was read through a feed is not kept in a cache folder. A copy that is already there is used.
func TestCache(t *testing.T) {
	data, dir := random(2*pieceBytes), t.TempDir()
	wrong := slices.Clone(data)
	wrong[len(data)-1] ^= 1
	s, from := supply(t, shared(wrong)), serve(t, data)
	for i, c := range []struct {
		isFed bool
		want  []byte
	}{{true, wrong}, {false, data}, {true, data}} {
		opt := source.Options{Fed: c.isFed, Storage: map[string]string{"cache": dir}}
		src, err := open.With(opt).Open(t.Context(), from.URL)
		if err != nil {
			t.Fatal(i, err)
		}
		readAll(t, src, c.want)
		if err := src.Close(); err != nil {
			t.Fatal(i, err)
		}
	}
	if n := s.count(fed.Ask, 2); n != 2 {
		t.Errorf("%d questions, not 2: the copy was not used", n)
	}
}

// Waiting reads end with their context, and with the source. An answer after that is not used.
func TestEnds(t *testing.T) {
	data := random(2 * pieceBytes)
	s := supply(t, nil)
	src := fedSource(t, serve(t, data).URL)
	ctx, cancel := context.WithCancelCause(t.Context())
	time.AfterFunc(20*time.Millisecond, func() { cancel(errs.ErrCancelled) })
	if err := src.ReadAt(ctx, make([]byte, len(data)), 0); !errors.Is(err, errs.ErrCancelled) {
		t.Error(err)
	}
	time.AfterFunc(20*time.Millisecond, func() { _ = src.Close() })
	if err := src.ReadAt(t.Context(), make([]byte, len(data)), 0); err == nil {
		t.Error("no error")
	}
	s.count(fed.Close, 1)
	if used, err := s.feed.Answer(1, 0, data[:pieceBytes], nil); used || err != nil {
		t.Error(used, err)
	}
}

// The supplier reads pieces through the source, and gets their checksums.
func TestRead(t *testing.T) {
	data := random(2*pieceBytes + 5)
	s, from := supply(t, nil), serve(t, data)
	fedSource(t, from.URL)
	for i, want := range [][]byte{data[:pieceBytes], data[pieceBytes : 2*pieceBytes], data[2*pieceBytes:]} {
		to := make([]byte, len(want))
		got, err := s.feed.Read(t.Context(), 1, int64(i), to)
		if err != nil || !bytes.Equal(to, want) || !slices.Equal(got, sums(want)) {
			t.Errorf("piece %d: %v, or wrong bytes", i, err)
		}
		if _, err := s.feed.Read(t.Context(), 1, int64(i), append(to, 0)); !errors.Is(err, errs.ErrArgument) {
			t.Error(err)
		}
	}
	for _, c := range [][2]int64{{1, 3}, {1, -1}, {2, 0}} {
		if _, err := s.feed.Read(t.Context(), c[0], c[1], data); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%v: %v", c, err)
		}
	}
}

// Many readers get the right bytes while the supplier answers in any order, wrongly, late or not at all, and while the
// feed is closed.
func TestFaults(t *testing.T) {
	data := random(20 * pieceBytes)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	s := supply(t, func(f *fed.Feed, e fed.Event) {
		pause, kind := time.Duration(r.IntN(20))*time.Millisecond, r.IntN(8)
		time.AfterFunc(pause, func() {
			b := piece(data, e)
			switch c := sums(b); kind {
			case 0:
				_, _ = f.Answer(e.File, e.Piece, nil, nil)
			case 1:
				b[0]++
				_, _ = f.Answer(e.File, e.Piece, b, c)
			default:
				_, _ = f.Answer(e.File, e.Piece, b, c)
			}
		})
	})
	src := fedSource(t, serve(t, data).URL)
	time.AfterFunc(time.Duration(r.IntN(300))*time.Millisecond, s.feed.Close)
	err := spawn.Each(t.Context(), "test", 8, 60, func(i int) error {
		off := (i * 7_654_321) % (len(data) - 3*pieceBytes)
		got := make([]byte, 1+(i*1_234_567)%(3*pieceBytes))
		if err := src.ReadAt(t.Context(), got, int64(off)); err != nil {
			return err
		}
		if !bytes.Equal(got, data[off:off+len(got)]) {
			return fmt.Errorf("wrong bytes at %d", off)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// Two states of an object, and equal states at two stores, have different names. A small object is not fed.
func TestNames(t *testing.T) {
	data := random(pieceBytes)
	s := supply(t, func(f *fed.Feed, e fed.Event) { _, _ = f.Answer(e.File, e.Piece, nil, nil) })
	first := serve(t, data)
	secret := "http://user:password@" + first.URL[len("http://"):] + "/a?signature=secret"
	for _, url := range []string{first.URL + "/a", first.URL + "/a", secret, first.URL + "/b", serve(t, data).URL + "/a"} {
		readAll(t, fedSource(t, url), data)
	}
	data[0]++
	readAll(t, fedSource(t, first.URL+"/a"), data)
	readAll(t, fedSource(t, serve(t, data[:source.HeadBytes]).URL), data[:source.HeadBytes])
	if n := s.count(fed.Ask, 6); n != 6 {
		t.Fatalf("%d pieces were asked for", n)
	}
	var names []string
	for _, e := range s.seen {
		if e.What == fed.Ask {
			names = append(names, e.Name)
		}
		if bytes.Contains([]byte(e.URI+e.Name), []byte("secret")) || bytes.Contains([]byte(e.URI), []byte("password")) {
			t.Errorf("%+v", e)
		}
	}
	if names[0] != names[1] || names[0] != names[2] || len(slices.Compact(slices.Sorted(slices.Values(names)))) != 4 {
		t.Error(names)
	}
}

// A source asks for announced pieces, each once, up to the feed's limit. When a piece has been read, it asks for the
// next one.
func TestAhead(t *testing.T) {
	data := random(8 * pieceBytes)
	s := serve(t, data)
	sup := supply(t, shared(data))
	src := fedSource(t, s.URL)
	announce := src.Facts().Prefetch
	announce(0, src.Size())
	announce(0, src.Size())
	if n := sup.count(fed.Ask, 4); n != 4 {
		t.Fatalf("%d questions, not 4", n)
	}
	for i := range int64(8) {
		got := make([]byte, pieceBytes)
		if err := src.ReadAt(t.Context(), got, i*pieceBytes); err != nil ||
			!bytes.Equal(got, data[i*pieceBytes:][:pieceBytes]) {
			t.Fatal(i, err)
		}
		if want := min(8, int(i)+5); sup.count(fed.Ask, want) != want {
			t.Fatalf("after %d pieces: %d questions, not %d", i+1, sup.count(fed.Ask, want), want)
		}
	}
	if n := sup.count(fed.Free, 8); n != 8 {
		t.Errorf("%d pieces freed, not 8", n)
	}
}

// A read waits longer for a piece if the supplier says so.
func TestWait(t *testing.T) {
	data := random(2 * pieceBytes)
	late := make(chan struct{})
	s := supply(t, func(f *fed.Feed, e fed.Event) {
		f.Wait(e.File, e.Piece, time.Minute)
		f.Wait(e.File+1, e.Piece, time.Minute) // there is none
		spawn.Go("test", func() {
			<-late
			shared(data)(f, e)
		})
	})
	src := fedSource(t, serve(t, data).URL)
	time.AfterFunc(3*time.Second, func() { close(late) })
	readAll(t, src, data)
	if n := s.count(fed.Late, 0); n != 0 {
		t.Errorf("%d pieces were late", n)
	}
}
