//go:build goexperiment.simd && amd64

package tensors

import (
	"simd/archsimd"
	"unsafe"
)

// group is how many bytes are crypted at once: sixteen blocks, each a lane.
const group = 16 * 64

var (
	wide  = archsimd.X86.AVX512()
	lanes = [16]uint32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
)

// xorBlocks crypts whole groups at the front of p with Salsa20/20 and returns
// how many bytes that were; counter has the number of the first block.
func xorBlocks(p []byte, counter *[16]byte, key *[32]byte) int {
	if !wide {
		return 0
	}
	var words [16]uint32
	for i, c := range [4]uint32{0x61707865, 0x3320646e, 0x79622d32, 0x6b206574} {
		words[5*i] = c
	}
	for i := range 4 {
		words[1+i] = le.Uint32(key[4*i:])
		words[11+i] = le.Uint32(key[16+4*i:])
		words[6+i] = le.Uint32(counter[4*i:])
	}
	at := le.Uint64(counter[8:])
	done := 0
	for ; len(p)-done >= group; done += group {
		if at>>32 != (at+15)>>32 {
			break // the high half is one for all lanes
		}
		words[8], words[9] = uint32(at), uint32(at>>32)
		xorGroup((*[group]byte)(p[done:]), &words)
		at += 16
	}
	return done
}

func xorGroup(p *[group]byte, w *[16]uint32) {
	x0, x1 := archsimd.BroadcastUint32x16(w[0]), archsimd.BroadcastUint32x16(w[1])
	x2, x3 := archsimd.BroadcastUint32x16(w[2]), archsimd.BroadcastUint32x16(w[3])
	x4, x5 := archsimd.BroadcastUint32x16(w[4]), archsimd.BroadcastUint32x16(w[5])
	x6, x7 := archsimd.BroadcastUint32x16(w[6]), archsimd.BroadcastUint32x16(w[7])
	x8, x9 := archsimd.BroadcastUint32x16(w[8]).Add(archsimd.LoadUint32x16(&lanes)), archsimd.BroadcastUint32x16(w[9])
	x10, x11 := archsimd.BroadcastUint32x16(w[10]), archsimd.BroadcastUint32x16(w[11])
	x12, x13 := archsimd.BroadcastUint32x16(w[12]), archsimd.BroadcastUint32x16(w[13])
	x14, x15 := archsimd.BroadcastUint32x16(w[14]), archsimd.BroadcastUint32x16(w[15])
	counters := x8
	for range 10 {
		x4 = x4.Xor(x0.Add(x12).RotateAllLeft(7))
		x9 = x9.Xor(x5.Add(x1).RotateAllLeft(7))
		x14 = x14.Xor(x10.Add(x6).RotateAllLeft(7))
		x3 = x3.Xor(x15.Add(x11).RotateAllLeft(7))
		x8 = x8.Xor(x4.Add(x0).RotateAllLeft(9))
		x13 = x13.Xor(x9.Add(x5).RotateAllLeft(9))
		x2 = x2.Xor(x14.Add(x10).RotateAllLeft(9))
		x7 = x7.Xor(x3.Add(x15).RotateAllLeft(9))
		x12 = x12.Xor(x8.Add(x4).RotateAllLeft(13))
		x1 = x1.Xor(x13.Add(x9).RotateAllLeft(13))
		x6 = x6.Xor(x2.Add(x14).RotateAllLeft(13))
		x11 = x11.Xor(x7.Add(x3).RotateAllLeft(13))
		x0 = x0.Xor(x12.Add(x8).RotateAllLeft(18))
		x5 = x5.Xor(x1.Add(x13).RotateAllLeft(18))
		x10 = x10.Xor(x6.Add(x2).RotateAllLeft(18))
		x15 = x15.Xor(x11.Add(x7).RotateAllLeft(18))

		x1 = x1.Xor(x0.Add(x3).RotateAllLeft(7))
		x6 = x6.Xor(x5.Add(x4).RotateAllLeft(7))
		x11 = x11.Xor(x10.Add(x9).RotateAllLeft(7))
		x12 = x12.Xor(x15.Add(x14).RotateAllLeft(7))
		x2 = x2.Xor(x1.Add(x0).RotateAllLeft(9))
		x7 = x7.Xor(x6.Add(x5).RotateAllLeft(9))
		x8 = x8.Xor(x11.Add(x10).RotateAllLeft(9))
		x13 = x13.Xor(x12.Add(x15).RotateAllLeft(9))
		x3 = x3.Xor(x2.Add(x1).RotateAllLeft(13))
		x4 = x4.Xor(x7.Add(x6).RotateAllLeft(13))
		x9 = x9.Xor(x8.Add(x11).RotateAllLeft(13))
		x14 = x14.Xor(x13.Add(x12).RotateAllLeft(13))
		x0 = x0.Xor(x3.Add(x2).RotateAllLeft(18))
		x5 = x5.Xor(x4.Add(x7).RotateAllLeft(18))
		x10 = x10.Xor(x9.Add(x8).RotateAllLeft(18))
		x15 = x15.Xor(x14.Add(x13).RotateAllLeft(18))
	}
	var out [16][8]uint64 // out[4q+j], 16 bytes g: words 4q to 4q+3 of block 4g+j
	quad := func(q int, a, b, c, d archsimd.Uint32x16) {
		ab, cd := a.InterleaveLoGrouped(b).AsUint64x8(), c.InterleaveLoGrouped(d).AsUint64x8()
		AB, CD := a.InterleaveHiGrouped(b).AsUint64x8(), c.InterleaveHiGrouped(d).AsUint64x8()
		ab.InterleaveLoGrouped(cd).Store(&out[4*q])
		ab.InterleaveHiGrouped(cd).Store(&out[4*q+1])
		AB.InterleaveLoGrouped(CD).Store(&out[4*q+2])
		AB.InterleaveHiGrouped(CD).Store(&out[4*q+3])
	}
	plus := func(x archsimd.Uint32x16, i int) archsimd.Uint32x16 { return x.Add(archsimd.BroadcastUint32x16(w[i])) }
	quad(0, plus(x0, 0), plus(x1, 1), plus(x2, 2), plus(x3, 3))
	quad(1, plus(x4, 4), plus(x5, 5), plus(x6, 6), plus(x7, 7))
	quad(2, x8.Add(counters), plus(x9, 9), plus(x10, 10), plus(x11, 11))
	quad(3, plus(x12, 12), plus(x13, 13), plus(x14, 14), plus(x15, 15))
	base := unsafe.Pointer(p)
	for block := range 16 {
		g, j := block/4, block%4
		to := (*[8]uint64)(unsafe.Add(base, 64*block))
		for q := range 4 {
			from := &out[4*q+j]
			to[2*q] ^= from[2*g]
			to[2*q+1] ^= from[2*g+1]
		}
	}
}
