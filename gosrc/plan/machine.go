package plan

// This file chooses sizes of pieces, ranges and slots for a machine.

// A Machine is what a load runs on and reads from. How much is read at once, and by
// how many workers, follows from it.
type Machine struct {
	// SlotBytes are those of a device's slots, as they are cut for these sources;
	// 0: the load lands on the host.
	SlotBytes int64
	Cores     int
	Threads   int // the caller's; 0: as many as serve the load best
	// Concurrency is the most reads at once that one of the sources has use for, and
	// RangeBytes what a range of theirs best has that is read in steps, 0 unless all
	// have such ranges; see source.Facts.
	Concurrency int
	RangeBytes  int64
	DirectIO    bool // some of the sources can read whole blocks into place
}

const (
	// stepPiece is what the second-level cache holds.
	stepPiece = 1 << 20
	// remotePiece takes 3 ms on a link of 10 Gbit/s: an answer's overhead is lost in
	// it, and sixteen of them are all the memory that a load needs.
	remotePiece = 4 << 20
	// deviceRange is the size of a range for a GPU's slots. With 4 MiB, workers
	// waited for responses 30 % of the time, with 32 MiB 5 %; more gained nothing.
	deviceRange = 32 << 20
	// directAlign is the block that direct I/O begins and ends at; other sources are
	// asked for just what is wanted.
	directAlign = 4096
	// Feeders is how many readers keep a fast disk, or a device, busy.
	Feeders = 16
)

// Limits is what is read at once: on the host about one compressed chunk, so that
// it is still in the second-level cache when it is decoded; for a device what fills
// a slot, by several workers, so that few slots are being filled and most are on
// their way. Where a read costs a round trip it is as much as hides that, and a gap
// costs less than another one; unless ranges are read in steps, which are as small
// as local reads.
func (m Machine) Limits() Limits {
	lim := Limits{Piece: stepPiece, Gap: 64 << 10, InPlace: true}
	switch roundTrips := m.Concurrency > 1 && m.RangeBytes == 0; {
	case m.SlotBytes > 0 && roundTrips:
		lim = Limits{Piece: m.SlotBytes, Gap: 512 << 10, Part: remotePiece}
	case m.SlotBytes > 0:
		lim = Limits{Piece: m.SlotBytes, Gap: 256 << 10, Part: stepPiece}
	case roundTrips:
		lim = Limits{Piece: remotePiece, Gap: 512 << 10, InPlace: true}
	}
	if m.DirectIO {
		lim.Align = directAlign
	}
	return lim
}

// Workers is how many a load has: what the caller said, else at least one a core
// on the host. For a device it is as many as feed it, however many cores there are:
// they wait for the disk and for free slots more than they work, and 32 of them
// were slower than 16. depth is the reads in flight that the disks want.
func (m Machine) Workers(depth int) int {
	if m.Threads > 0 {
		return m.Threads
	}
	readers := max(1, m.Cores)
	if m.SlotBytes > 0 {
		readers = Feeders
	}
	return max(readers, depth, m.Concurrency)
}

// Range returns how many bytes each range of a load should have, if atOnce ranges
// are open: few round trips, and still a few ranges for each
// connection, since at the end none should be waited for long.
func (m Machine) Range(read int64, atOnce int) int64 {
	most := m.RangeBytes
	if m.SlotBytes > 0 {
		most = deviceRange
	}
	return min(most, max(m.Limits().Piece, read/int64(4*max(1, atOnce))))
}
