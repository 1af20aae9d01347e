package plan

// This file chooses the sizes of pieces, ranges and slots for a machine.

// A Machine describes the machine and the sources of a load. They determine the size of reads and the number of
// workers.
type Machine struct {
	// SlotBytes is the size of the device's slots for these sources; 0 means that the load lands on the host.
	SlotBytes int64
	Cores     int
	Threads   int // the caller's; 0 means as many as suit the load
	Ranks     int // processes of the host that share the cores and each read a part; 0 counts as 1
	// InGroup says that what is read also goes to other ranks, piece by piece. A piece waits for the last of its
	// slots.
	InGroup bool
	// Concurrency is the most reads in flight that any of the sources can use. RangeBytes is the best size of
	// ranges that are read in steps, 0 unless all sources have such ranges; see source.Facts.
	Concurrency int
	RangeBytes  int64
	DirectIO    bool // a source can read whole blocks into place
	SumsShares  bool // checksums are compared on the GPU once a rank's whole share of a piece is there
}

const (
	// StepPiece fits the second-level cache.
	StepPiece = 1 << 20
	// remotePiece takes 3 ms on a 10 Gbit/s link, which hides a response's overhead. Sixteen pieces are all the
	// memory that a load needs.
	remotePiece = 4 << 20
	// deviceRange is the size of a range for a GPU's slots. Workers waited for responses 30 % of the time with 4
	// MiB and 5 % with 32 MiB; larger ranges gained nothing.
	deviceRange = 32 << 20
	// directAlign is the alignment of direct I/O. Other sources read exactly the wanted bytes.
	directAlign = 4096
	// Feeders is how many readers keep a fast disk or a device busy.
	Feeders = 16
	// spareCores is how many cores a process without other ranks keeps free of readers.
	spareCores = 2
	// fewFeeders is the minimum number of readers of a rank that shares its host: one reads while the other waits
	// for a slot.
	fewFeeders = 2
)

// OwnSlots reports whether each reader of local files fills slots of its own, small enough that they are still in
// its core's cache. This pays off if one driver call submits many slots and slots launch no kernels.
func (m Machine) OwnSlots() bool { return m.InGroup && m.Concurrency == 0 }

// Limits chooses the size of reads. On the host it is about one compressed chunk, which is then still in the
// second-level cache when it is decoded. For a device, several workers fill a slot, so that few slots are being
// filled and most are on their way. If a read costs a round trip, reads are large enough to hide that, and gaps
// are read rather than skipped. Ranges that are read in steps use steps as small as local reads.
func (m Machine) Limits() Limits {
	lim := Limits{Piece: StepPiece, Gap: 64 << 10, InPlace: true}
	switch roundTrips := m.Concurrency > 1 && m.RangeBytes == 0; {
	case m.SlotBytes > 0 && roundTrips:
		lim = Limits{Piece: m.SlotBytes, Gap: 512 << 10, Share: remotePiece}
	case m.SlotBytes > 0:
		lim = Limits{Piece: m.SlotBytes, Gap: 256 << 10, Share: StepPiece}
		if m.OwnSlots() {
			lim.Share, lim.Cut = 0, m.SumsShares
		}
	case roundTrips:
		lim = Limits{Piece: remotePiece, Gap: 512 << 10, InPlace: true}
	}
	if m.DirectIO {
		lim.Align = directAlign
	}
	return lim
}

// Workers is the number of workers: the caller's choice, or else on the host at least one per core. depth is how
// many reads in flight suit the disks.
//
// For a device it is Feeders, since 32 workers were slower than 16. If each could have a core of its own, two
// cores stay free for the threads that submit to the device and wait for it: 16 readers on 16 cores loaded plain
// bytes at 44.5 GB/s, 14 at 49.2. With fewer cores, more readers than cores are faster: 8 cores lose 3 % with 7
// readers, 4 cores 5 % with 4.
//
// Ranks that share the cores also share the readers. There are as many readers as cores, but at least Feeders in
// all and at most Feeders per rank, and at least fewFeeders per rank. If the ranks exchange what they read, some
// cores are spared for the threads that move it: a piece is as late as its last reader, and a reader that shares
// its core with another thread is late by milliseconds. Two ranks on 32 cores load fastest with 13 readers each
// (the median with 11 is 0.96 of that rate), four ranks on 64 cores with 11: 52 readers together load no faster
// than 44.
func (m Machine) Workers(depth int) int {
	if m.Threads > 0 {
		return m.Threads
	}
	readers, ranks := max(1, m.Cores), max(1, m.Ranks)
	if m.SlotBytes > 0 {
		readers = Feeders
		if m.Cores >= Feeders {
			readers = min(Feeders, m.Cores-spareCores)
		}
		if ranks > 1 {
			readers = min(Feeders*ranks, max(Feeders, m.Cores))
		}
		if m.InGroup && m.Cores > 0 {
			forMovers := m.Cores * 5 / 16
			if m.Cores <= 2*Feeders {
				forMovers = m.Cores * 3 / 16
			}
			readers = min(readers, m.Cores-forMovers)
		}
	}
	least := 1
	if ranks > 1 && m.SlotBytes > 0 {
		least = fewFeeders
	}
	return max(least, readers/ranks, (depth+ranks-1)/ranks, m.Concurrency)
}

// Range returns how many bytes each range of a load should have if atOnce ranges are open. It is large enough for
// few round trips, and small enough that each connection gets several ranges and the load does not wait long for
// a last one.
func (m Machine) Range(read int64, atOnce int) int64 {
	most := m.RangeBytes
	if m.SlotBytes > 0 {
		most = deviceRange
	}
	return min(most, max(m.Limits().Piece, read/int64(4*max(1, atOnce))))
}
