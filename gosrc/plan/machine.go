package plan

// This file chooses the sizes of pieces, ranges and slots for a machine.

// A Machine describes the machine and the sources of a load, which determine the size of reads and the number of
// workers.
type Machine struct {
	// SlotBytes is the size of the device's slots for these sources. 0 means a load to the host.
	SlotBytes int64
	Cores     int
	Threads   int // number set by the caller; 0 means automatic
	Ranks     int // processes on the host that share the cores and each read a part; 0 counts as 1
	// InGroup means that a rank sends what it reads to other ranks, piece by piece. A piece is complete when its last
	// slot is complete.
	InGroup bool
	// Concurrency is the maximum number of reads in flight that a source can use. RangeBytes is the best size of a
	// range, or 0 if a source has no ranges. See source.Facts.
	Concurrency int
	RangeBytes  int64
	DirectIO    bool // a source can read whole blocks directly to the destination
	SumsShares  bool // the GPU compares checksums when a rank's whole share of a piece has arrived
}

const (
	// StepPiece fits in the L2 cache.
	StepPiece = 1 << 20
	// remotePiece takes 3 ms on a 10 Gbit/s link, which hides the overhead of a response. A load needs memory for only
	// sixteen such pieces.
	remotePiece = 4 << 20
	// deviceRange is the size of a range for a GPU's slots. Workers waited for responses 30 % of the time with 4
	// MiB, and 5 % with 32 MiB. Larger ranges were no faster.
	deviceRange = 32 << 20
	// directAlign is the alignment of direct I/O. Other sources read exactly the wanted bytes.
	directAlign = 4096
	// Feeders is the number of readers that keep a fast disk or a device busy.
	Feeders = 16
	// spareCores is the number of cores that a process without other ranks leaves free of readers.
	spareCores = 2
	// fewFeeders is the minimum number of readers of a rank that shares its host, and of a load on one core. One reads
	// while the other waits for a slot.
	fewFeeders = 2
	// fewCores is the largest number of cores for HasFewCores.
	fewCores = 4
)

// HasFewCores reports whether processor time limits a load of local files to a device. With half of the slots and 1.5
// readers per core, second loads on 4 cores took 2 % less time for plain bytes and 11 % less for compressed ones. On
// 8 cores they took 9 and 14 % more.
func (m Machine) HasFewCores() bool {
	return m.Cores > 0 && m.Cores <= fewCores && m.Ranks <= 1 && !m.InGroup && m.Concurrency <= 1
}

// OwnSlots reports whether each reader of local files fills its own slots, which are small enough to stay in the
// core's cache. This pays off if one driver call submits many slots and slots launch no kernels.
func (m Machine) OwnSlots() bool { return m.InGroup && m.Concurrency == 0 }

// Limits returns the sizes of reads. On the host a read is about one compressed chunk, which is then decoded from the
// L2 cache. For a device, several workers fill one slot, so that few slots are being filled and most are being
// copied. If each read costs a round trip, reads are large enough to hide it, and gaps are read instead of skipped.
// The steps of a range are as small as local reads.
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

// Workers returns the number of workers. If the caller has set a number, it is used. On the host, there is otherwise at
// least one worker per core. depth is the number of reads in flight that the disks need.
//
// For a device the number is Feeders, because 32 workers were slower than 16. With at least Feeders cores, two cores
// stay free for the threads that submit to the device and wait for it: 16 readers on 16 cores loaded plain bytes at
// 44.5 GB/s, and 14 readers at 49.2 GB/s. With fewer cores, more readers than cores are faster: with 7 readers, 8 cores
// are 3 % slower than with 16. On up to fewCores cores, local files have 1.5 readers per core: with 4 readers, 4 cores
// load plain bytes 10 % slower than with 6, and compressed ones 2 % slower.
//
// Ranks that share the cores also share the readers. There are as many readers as cores, but at least Feeders in total
// and between fewFeeders and Feeders per rank. If the ranks send each other what they read, some cores are left to the
// threads that send: a piece is as late as its last reader, and a reader that shares a core with another thread is
// milliseconds late. Two ranks on 32 cores load fastest with 13 readers each (the median rate with 11 is 0.96 of
// that). Four ranks on 64 cores load fastest with 11: 52 readers in total are no faster than 44.
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
		if m.HasFewCores() {
			readers = max(fewFeeders, m.Cores*3/2)
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

// Range returns the size in bytes of each range of a load when atOnce ranges are open. Ranges are large enough for few
// round trips. They are also small enough that each connection gets several, and that the load does not wait long for
// the last one.
func (m Machine) Range(read int64, atOnce int) int64 {
	most := m.RangeBytes
	if m.SlotBytes > 0 {
		most = deviceRange
	}
	return min(most, max(m.Limits().Piece, read/int64(4*max(1, atOnce))))
}
