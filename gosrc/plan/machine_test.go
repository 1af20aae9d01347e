package plan

import "testing"

// Limits and Workers return the expected values for every kind of source and device.
func TestMachine(t *testing.T) {
	const slot, rng = 8 << 20, 8 << 20
	for _, c := range []struct {
		name    string
		m       Machine
		lim     Limits
		workers int // at depth 20
	}{
		{"local", Machine{Cores: 4}, Limits{Piece: 1 << 20, Gap: 64 << 10, InPlace: true}, 20},
		{"local, direct I/O", Machine{Cores: 64, DirectIO: true},
			Limits{Piece: 1 << 20, Gap: 64 << 10, InPlace: true, Align: 4096}, 64},
		{"in order", Machine{Cores: 4, Concurrency: 1}, Limits{Piece: 1 << 20, Gap: 64 << 10, InPlace: true}, 20},
		{"remote", Machine{Cores: 4, Concurrency: 64}, Limits{Piece: 4 << 20, Gap: 512 << 10, InPlace: true}, 64},
		{"remote, in steps", Machine{Cores: 4, Concurrency: 64, RangeBytes: rng},
			Limits{Piece: 1 << 20, Gap: 64 << 10, InPlace: true}, 64},
		{"said", Machine{Cores: 4, Concurrency: 64, Threads: 3}, Limits{Piece: 4 << 20, Gap: 512 << 10, InPlace: true},
			3},
		{"device", Machine{Cores: 64, SlotBytes: slot}, Limits{Piece: slot, Gap: 256 << 10, Share: 1 << 20}, 20},
		{"one of four ranks, few cores", Machine{Cores: 16, SlotBytes: slot, Ranks: 4},
			Limits{Piece: slot, Gap: 256 << 10, Share: 1 << 20}, 5},
		{"one of eight ranks, few cores", Machine{Cores: 2, SlotBytes: slot, Ranks: 8},
			Limits{Piece: slot, Gap: 256 << 10, Share: 1 << 20}, 3},
		{"one of four ranks, many cores", Machine{Cores: 64, SlotBytes: slot, Ranks: 4},
			Limits{Piece: slot, Gap: 256 << 10, Share: 1 << 20}, 16},
		{"one of two ranks, more cores", Machine{Cores: 256, SlotBytes: slot, Ranks: 2},
			Limits{Piece: slot, Gap: 256 << 10, Share: 1 << 20}, 16},
		{"one of two ranks that exchange", Machine{Cores: 32, SlotBytes: slot, Ranks: 2, InGroup: true},
			Limits{Piece: slot, Gap: 256 << 10}, 13},
		{"one of four ranks that exchange", Machine{Cores: 64, SlotBytes: slot, Ranks: 4, InGroup: true},
			Limits{Piece: slot, Gap: 256 << 10}, 11},
		{"one of two ranks that exchange, remote", Machine{Cores: 32, SlotBytes: slot, Ranks: 2, InGroup: true,
			Concurrency: 64}, Limits{Piece: slot, Gap: 512 << 10, Share: 4 << 20}, 64},
		{"one of two ranks that exchange, more cores", Machine{Cores: 256, SlotBytes: slot, Ranks: 2, InGroup: true},
			Limits{Piece: slot, Gap: 256 << 10}, 16},
		{"one of eight ranks that exchange, few cores", Machine{Cores: 8, SlotBytes: slot, Ranks: 8, InGroup: true},
			Limits{Piece: slot, Gap: 256 << 10}, 3},
		{"one of four ranks, the host", Machine{Cores: 16, Ranks: 4},
			Limits{Piece: 1 << 20, Gap: 64 << 10, InPlace: true}, 5},
		{"device, remote", Machine{Cores: 64, SlotBytes: slot, Concurrency: 16},
			Limits{Piece: slot, Gap: 512 << 10, Share: 4 << 20}, 20},
		{"device, in steps", Machine{SlotBytes: slot, Concurrency: 64, RangeBytes: rng, DirectIO: true},
			Limits{Piece: slot, Gap: 256 << 10, Share: 1 << 20, Align: 4096}, 64},
	} {
		if lim := c.m.Limits(); lim != c.lim {
			t.Errorf("%s: %+v, want %+v", c.name, lim, c.lim)
		}
		if n := c.m.Workers(20); n != c.workers {
			t.Errorf("%s: %d workers, want %d", c.name, n, c.workers)
		}
	}
	for cores, want := range map[int]int{0: 16, 1: 2, 3: 4, 4: 6, 5: 16, 15: 16, 16: 14, 17: 15, 18: 16, 64: 16} {
		if n := (Machine{Cores: cores, SlotBytes: slot}).Workers(0); n != want {
			t.Errorf("%d readers of a GPU on %d cores, want %d", n, cores, want)
		}
	}
	host, dev := Machine{Concurrency: 64, RangeBytes: rng}, Machine{SlotBytes: slot, Concurrency: 64, RangeBytes: rng}
	for _, c := range []struct {
		m      Machine
		read   int64
		atOnce int
		want   int64
	}{
		{host, 1 << 40, 8, rng}, {host, 64 << 20, 8, 2 << 20}, {host, 10, 8, 1 << 20}, {host, 64 << 20, 0, rng},
		{dev, 1 << 40, 8, 32 << 20}, {dev, 64 << 20, 1, 16 << 20}, {dev, 64 << 20, 16, slot},
	} {
		if n := c.m.Range(c.read, c.atOnce); n != c.want {
			t.Errorf("%+v: a range of %d, want %d", c, n, c.want)
		}
	}
}
