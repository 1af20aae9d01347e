//go:build owfake

package relay_test

// This file runs the ranks of a group as separate processes, which exchange the pieces of a group load through shared
// memory of the fake driver or of the host.

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/load/loadtest"
	"github.com/overwire/overwire/gosrc/peers"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/relay"
	"github.com/overwire/overwire/gosrc/save"
)

// A trial is one group load by all ranks, in which at most one rank fails.
type trial struct {
	Where  string
	Cut    string // "some": tensors are whole or cut along dimension 0 or 1; "columns": all are cut along dimension 1
	Wrong  string // "": nothing; "call": a driver call; otherwise the step at which the rank dies or cancels
	Rank   int    // the rank that fails
	Call   int64
	Sticky bool
	After  int64 // microseconds from Start to the cancellation if Wrong is "soon"

	Buffers, Stages int // for the group load; 0 means 3 and 2
}

// said is what a rank reports after each step. All ranks receive all reports.
type said struct {
	Offer *peers.Offer `json:",omitempty"`
	Error string       `json:",omitempty"`
	Class string       `json:",omitempty"`
	Lost  []int        `json:",omitempty"`
	Left  string       `json:",omitempty"`
	Wrong string       `json:",omitempty"` // tensors with wrong bytes
	Came  []string     `json:",omitempty"` // tensors that landed before an error
	Calls int64        `json:",omitempty"`
	Pulls int64        `json:",omitempty"` // bytes copied from other ranks
	Gone  bool         `json:",omitempty"` // the rank's process has ended
}

func (s *said) failed(err error) *said {
	if err != nil {
		s.Error, s.Class = err.Error(), errs.Class(err)
	}
	return s
}

const rankEnv = "OVERWIRE_TEST_RANK" // rank, number of ranks, and file, for a process that runs a rank

// A ranked is a group of processes that run ranks.
type ranked struct {
	t     *testing.T
	in    []io.WriteCloser
	out   []*bufio.Reader
	ended sync.WaitGroup
}

func newRanked(t *testing.T, ranks int, path string) *ranked {
	g := &ranked{t: t}
	t.Cleanup(func() {
		for _, in := range g.in {
			_ = in.Close()
		}
		g.ended.Wait()
	})
	for rank := range ranks {
		c := exec.Command(os.Args[0], "-test.run=^TestRank$", "-test.timeout=5m")
		c.Env = append(os.Environ(), fmt.Sprintf("%s=%d %d %s", rankEnv, rank, ranks, path))
		in, err := c.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := c.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		c.Stderr = os.Stderr
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		g.in, g.out = append(g.in, in), append(g.out, bufio.NewReader(out))
		g.ended.Add(1)
		go func() { // waits for the process to end
			defer g.ended.Done()
			_ = c.Wait()
		}()
	}
	return g
}

// step collects the reports of all ranks and sends all of them to each rank.
func (g *ranked) step() []said {
	all := make([]said, len(g.in))
	for rank, out := range g.out {
		for {
			line, err := out.ReadString('\n')
			if err != nil {
				all[rank].Gone = true
				break
			}
			if text, is := strings.CutPrefix(line, "rank "); is {
				if err := json.Unmarshal([]byte(text), &all[rank]); err != nil {
					g.t.Fatal(err)
				}
				break
			}
		}
	}
	text, _ := json.Marshal(all)
	for _, in := range g.in {
		_, _ = fmt.Fprintf(in, "%s\n", text) // a rank may have ended
	}
	return all
}

// try runs a trial, and returns the ranks' final reports.
func (g *ranked) try(c trial) []said {
	text, _ := json.Marshal(c)
	for _, in := range g.in {
		_, _ = fmt.Fprintf(in, "%s\n", text)
	}
	g.step() // offers
	g.step() // joined
	return g.step()
}

// TestRank runs one rank in a process started by newRanked.
func TestRank(t *testing.T) {
	var rank, ranks int
	var path string
	if n, _ := fmt.Sscanf(os.Getenv(rankEnv), "%d %d %s", &rank, &ranks, &path); n != 3 {
		t.Skip("runs only in processes that other tests start")
	}
	m := loadtest.OpenModel(t, path)
	in := bufio.NewReader(os.Stdin)
	tell := func(s *said) (all []said) {
		text, _ := json.Marshal(s)
		fmt.Printf("rank %s\n", text)
		line, err := in.ReadBytes('\n')
		if err != nil {
			os.Exit(3)
		}
		if err := json.Unmarshal(line, &all); err != nil {
			t.Fatal(err)
		}
		return all
	}
	travel := filled(m)
	reqs, want := map[string][]load.Request{"": asked(m, travel, rank)}, map[string][][]byte{}
	for _, cut := range []string{"some", "columns"} {
		reqs[cut] = blocks(m, travel, cutting(m, travel, cut), rank, ranks)
	}
	for cut, r := range reqs {
		want[cut] = sliced(t, m, r)
	}
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return
		}
		var c trial
		if err := json.Unmarshal(line, &c); err != nil {
			t.Fatal(err)
		}
		if c.Rank != rank {
			c.Wrong = ""
		}
		// Open the model again, because the file may have been damaged since the last trial.
		now := loadtest.OpenModel(t, path)
		end := cuda.Fake(512 << 20)
		s := ranking(t, now, c, travel, reqs[c.Cut], want[c.Cut], rank, ranks, tell)
		s.Left = end()
		now.Close()
		tell(s)
	}
}

// cutting returns the dimension along which each tensor is cut.
func cutting(m *load.Model, travel []int64, how string) (cuts []int64) {
	for i, at := range travel {
		cut := int64(i%3) - 1
		if how == "columns" {
			cut = 1
		}
		if cut >= int64(len(m.Index().Tensors[at].Shape)) || m.Index().Tensors[at].DType.Bits() < 8 {
			cut = -1
		}
		cuts = append(cuts, cut)
	}
	return cuts
}

// blocks returns a rank's requests for tensors that are cut along these dimensions.
func blocks(m *load.Model, travel, cuts []int64, rank, ranks int) (reqs []load.Request) {
	for i, at := range travel {
		q := load.Request{Tensor: at, Hi0: plan.Whole, Hi1: plan.Whole}
		if cuts[i] >= 0 {
			size := m.Index().Tensors[at].Shape[cuts[i]]
			block := (size + int64(ranks) - 1) / int64(ranks)
			lo := min(int64(rank)*block, size)
			hi := min(lo+block, size)
			if cuts[i] == 0 {
				q.Lo0, q.Hi0 = lo, hi
			} else {
				q.Lo1, q.Hi1 = lo, hi
			}
		}
		reqs = append(reqs, q)
	}
	return reqs
}

// ranking runs a rank's part in a trial.
func ranking(t *testing.T, m *load.Model, c trial, travel []int64, reqs []load.Request, want [][]byte, rank, ranks int,
	tell func(*said) []said) *said {
	step := func(name string) {
		if c.Wrong == name {
			os.Exit(0)
		}
	}
	sizes := make([]int64, len(reqs))
	for i := range sizes {
		sizes[i] = int64(len(want[i]))
	}
	got := memoryOn(t, c.Where, sizes)
	defer got.free()
	before := cudatest.CountCalls()
	if c.Wrong == "call" {
		cudatest.FailCall(c.Call, 999, c.Sticky)
	}
	end := &said{}
	space := int64(256 << 10)
	if len(m.Index().Chunks) == 0 {
		space = 1280 << 10 // for plain tensors
	}
	spec := specOf(travel, memory{}, c.Where, rank, ranks, space*int64(ranks))
	spec.Mapped, spec.Buffers, spec.Stages = true, cmp.Or(c.Buffers, 3), cmp.Or(c.Stages, 2)
	if c.Cut != "" {
		for other := range ranks {
			for _, q := range blocks(m, travel, cutting(m, travel, c.Cut), other, ranks) {
				q.Dest = uintptr(other)
				spec.Needs = append(spec.Needs, q)
			}
		}
	}
	r, err := relay.Start(m, spec)
	if c.Wrong == "soon" && r != nil {
		time.AfterFunc(time.Duration(c.After)*time.Microsecond, r.Job().Cancel)
	}
	offer := (&said{}).failed(err)
	if err == nil {
		o, err := r.Offer()
		offer = (&said{Offer: &o}).failed(err)
	}
	step("offered")
	var offers []peers.Offer
	for _, o := range tell(offer) {
		if o.Offer != nil {
			offers = append(offers, *o.Offer)
		}
	}
	if r != nil && len(offers) == ranks {
		err = r.Join(offers)
	}
	step("joined")
	good := err == nil && len(offers) == ranks
	for _, o := range tell((&said{}).failed(err)) {
		good = good && o.Error == "" && !o.Gone
	}
	if r == nil {
		return end.failed(err)
	}
	step("alone") // no other rank can end before this rank has set its requests
	if err == nil && good {
		err = r.Aim(requests(reqs, got))
	}
	if !good || err != nil {
		r.Job().Cancel()
	}
	for c.Wrong == "moving" || c.Wrong == "cancelled" {
		if done, _, _, _ := r.Job().Progress(); done > 0 {
			step("moving")
			r.Job().Cancel()
			break
		}
		time.Sleep(time.Millisecond)
	}
	if done, e := r.Job().Wait(time.Minute); !done {
		e = errors.New("the job does not end")
		end.failed(e)
	} else if err == nil {
		err = e
	}
	came := make([]int, len(reqs))
	for more := true; more; {
		var at []int
		at, more = r.Ready(100, 0)
		for _, i := range at {
			came[i]++
		}
	}
	for i, n := range came {
		if n > 1 || n == 0 && err == nil {
			end.Wrong += fmt.Sprintf("request %d landed %d times ", i, n)
		}
		if n > 0 && err != nil {
			end.Came = append(end.Came, m.Index().Tensors[travel[i]].Name)
		}
	}
	end.Calls = cudatest.CountCalls() - before
	cudatest.FailCall(0, 0, false)
	if rep, is := r.Job().Value().(relay.Report); is {
		end.Lost, end.Pulls = rep.Lost, rep.Pulled
	}
	for i := range want {
		if err == nil && !bytes.Equal(got.read(i), want[i]) {
			end.Wrong += m.Index().Tensors[travel[i]].Name + " "
		}
	}
	return end.failed(err)
}

// fine fails the test unless all ranks have ended successfully.
func (g *ranked) fine(what any, all []said) (most int64) {
	g.t.Helper()
	for rank, s := range all {
		if s.Gone || s.Error != "" || s.Left != "" || s.Wrong != "" {
			g.t.Fatalf("%v: rank %d: %+v", what, rank, s)
		}
		most = max(most, s.Calls)
	}
	return most
}

// Four ranks load with a transport. If any driver call fails in one of them, all ranks end, nothing leaks, and the next
// group load succeeds.
func TestRanksExchange(t *testing.T) {
	path, _, _ := loadtest.WriteModel(t, save.Spec{Compress: true, ChunkBytes: 64 << 10}, "tied", 4<<20)
	g := newRanked(t, 4, path)
	g.fine("host", g.try(trial{Where: "cpu"}))
	g.fine("host, cut", g.try(trial{Where: "cpu", Cut: "some"}))
	g.fine("GPU, cut", g.try(trial{Where: "cuda:0", Cut: "some"}))
	calls := g.fine("GPU", g.try(trial{Where: "cuda:0"}))
	step := int64(61)
	if testing.Short() {
		step = 149
	}
	g.refuse(calls, step, "", "some")
	g.fine("after all", g.try(trial{Where: "cuda:0"}))
}

// Each rank gets its columns of plain tensors from all shares, even after failed calls, and with eight ranks.
func TestRanksExchangeColumns(t *testing.T) {
	path, _, _ := loadtest.WriteModel(t, save.Spec{}, "tied", 6<<20)
	for _, ranks := range []int{4, 8} {
		g := newRanked(t, ranks, path)
		g.fine("host", g.try(trial{Where: "cpu", Cut: "columns"}))
		all := g.try(trial{Where: "cuda:0", Cut: "columns"})
		calls := g.fine("GPU", all)
		for rank, s := range all {
			if s.Pulls == 0 {
				t.Errorf("rank %d of %d copied nothing from other ranks", rank, ranks)
			}
		}
		if ranks > 4 {
			continue
		}
		g.fine("GPU, some", g.try(trial{Where: "cuda:0", Cut: "some"}))
		g.refuse(calls, calls/5, "columns", "columns")
		g.fine("after all", g.try(trial{Where: "cuda:0", Cut: "columns"}))
	}
}

// refuse makes every step-th driver call fail in one of the ranks. All ranks end, with or without an error, and nothing
// leaks. Every third trial uses the other cut.
func (g *ranked) refuse(calls, step int64, cut, other string) {
	t, failed := g.t, 0
	t.Helper()
	for nth := int64(1); nth < calls; nth += step {
		c := trial{Where: "cuda:0", Wrong: "call", Rank: int(nth/step) % len(g.in), Call: nth, Sticky: nth/step%2 == 1,
			Cut: cut}
		if nth/step%3 == 2 {
			c.Cut = other
		}
		all := g.try(c)
		some := false
		for rank, s := range all {
			if s.Gone || s.Left != "" || s.Wrong != "" || len(s.Lost) > 0 {
				t.Fatalf("%+v: rank %d: %+v", c, rank, s)
			}
			some = some || s.Error != ""
			if s.Error != "" && s.Class == "EngineError" {
				t.Fatalf("%+v: rank %d: %+v", c, rank, s)
			}
		}
		if some {
			failed++
			if s := all[c.Rank]; s.Error == "" || s.Class != "DeviceError" && s.Class != "NotSupportedError" {
				t.Fatalf("%+v: %+v", c, all)
			}
		}
	}
	t.Logf("%d calls per rank: %d failed, and %d of these ended a relay", calls, (calls+step-1)/step, failed)
	if failed == 0 {
		t.Error("no relay failed")
	}
}

// A rank compares the checksums of what it reads before other ranks may copy it. If a chunk is damaged, its reader
// reports file, tensor and chunk, the loads of all ranks end with an error, and the tensor lands on no rank.
func TestRanksDamaged(t *testing.T) {
	path, m, _ := loadtest.WriteModel(t, save.Spec{Compress: true, ChunkBytes: 64 << 10}, "", 4<<20)
	g := newRanked(t, 3, path)
	g.fine("whole", g.try(trial{Where: "cuda:0"}))
	readers := map[int]bool{}
	for nth, at := range filled(m) {
		x := &m.Index().Tensors[at]
		if x.Count == 0 || nth%5 != 0 && nth+1 < len(m.Index().Tensors) {
			continue
		}
		n := int32(nth) % x.Count
		off := m.Index().Chunks[x.First+n].Off + int64(m.Index().Chunks[x.First+n].Stored)/2
		flip(t, path, off)
		for _, c := range []trial{{Where: "cuda:0"}, {Where: "cpu"}, {Where: "cuda:0", Cut: "some"}} {
			named := 0
			for rank, s := range g.try(c) {
				// If tensors are cut, some ranks do not need the chunk.
				short := s.Error == "" || slices.Contains(s.Came, x.Name)
				if s.Gone || s.Left != "" || s.Wrong != "" || short && c.Cut == "" || len(s.Lost) > 0 {
					t.Fatalf("%+v, chunk %d of %q: rank %d: %+v", c, n, x.Name, rank, s)
				}
				if s.Class != "CorruptError" {
					continue
				}
				named++
				readers[rank] = true
				for _, want := range []string{path, x.Name, fmt.Sprintf("chunk %d ", n), "checksum"} {
					if !strings.Contains(s.Error, want) {
						t.Errorf("%+v: %q is not in %q", c, want, s.Error)
					}
				}
			}
			if named != 1 {
				t.Errorf("%+v, chunk %d of %q: %d ranks name it", c, n, x.Name, named)
			}
		}
		flip(t, path, off)
	}
	if len(readers) < 2 {
		t.Errorf("only ranks %v read damaged chunks, want at least two", readers)
	}
	g.fine("after all", g.try(trial{Where: "cuda:0"}))
}

// flip flips a bit of a file without changing its modification time, like a damaged disk.
func flip(t *testing.T, path string, off int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	var b [1]byte
	if _, err := f.ReadAt(b[:], off); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 0x10
	state, err := f.Stat()
	if err == nil {
		_, err = f.WriteAt(b[:], off)
	}
	if err == nil {
		err = os.Chtimes(path, time.Time{}, state.ModTime())
	}
	if err != nil {
		t.Fatal(err)
	}
}

// If a rank dies or is cancelled at any step, the loads of all ranks end with an error that says so.
func TestRanksDie(t *testing.T) {
	path, _, _ := loadtest.WriteModel(t, save.Spec{Compress: true, ChunkBytes: 64 << 10}, "tied", 4<<20)
	for i, wrong := range []string{"offered", "joined", "alone", "moving", "cancelled"} {
		where := []string{"cuda:0", "cpu"}[i%2]
		if wrong == "moving" {
			where = "cuda:0"
		}
		g := newRanked(t, 3, path)
		c := trial{Where: where, Wrong: wrong, Rank: i % 3}
		all := g.try(c)
		for rank, s := range all {
			if rank == c.Rank && wrong != "cancelled" {
				if !s.Gone {
					t.Fatalf("%+v: the rank still runs", c)
				}
				continue
			}
			if s.Gone || s.Left != "" || s.Wrong != "" {
				t.Fatalf("%+v: rank %d: %+v", c, rank, s)
			}
			if s.Error == "" && (wrong == "moving" || wrong == "cancelled") {
				continue // its load had already ended
			}
			if s.Error == "" && wrong != "offered" {
				t.Fatalf("%+v: rank %d ended without an error", c, rank)
			}
			// A rank that joins after the death does not find the process, as if it were in another container.
			if wrong == "joined" && s.Class == "NotSupportedError" && len(s.Lost) == 0 {
				continue
			}
			// A rank that learned of the death from other ranks cancels its load.
			if died := wrong == "alone" || wrong == "moving"; (died ||
				wrong == "joined") != slices.Equal(s.Lost, []int{c.Rank}) || died && s.Class != "IOFailure" {
				t.Fatalf("%+v: rank %d: %+v", c, rank, s)
			}
		}
	}
}

// Ranks with one buffer, and staging for one share of each other rank, load everything. If a rank is cancelled at any
// time, the loads of all ranks end, nothing leaks, and the next load succeeds.
func TestRanksWithOneBuffer(t *testing.T) {
	path, _, _ := loadtest.WriteModel(t, save.Spec{Compress: true, ChunkBytes: 64 << 10}, "tied", 2<<20)
	for _, ranks := range []int{1, 2, 5} {
		g := newRanked(t, ranks, path)
		for i, after := range []int64{0, 300, 1000, 2000, 4000, 8000} {
			if testing.Short() && i%2 != 0 { // still each cut
				continue
			}
			c := trial{Where: "cuda:0", Cut: []string{"", "some", "columns"}[i%3], Buffers: 1, Stages: 1}
			g.fine(c, g.try(c))
			c.Wrong, c.After, c.Rank = "soon", after, i%ranks
			for rank, s := range g.try(c) {
				// The load that other ranks joined may have been closed since.
				if s.Gone || s.Left != "" || s.Wrong != "" || len(s.Lost) > 0 || s.Class == "EngineError" ||
					s.Error != "" && s.Class != "CancelledError" && s.Class != "IOFailure" && s.Class != "NotSupportedError" {
					t.Fatalf("%+v: rank %d of %d: %+v", c, rank, ranks, s)
				}
			}
		}
	}
}
