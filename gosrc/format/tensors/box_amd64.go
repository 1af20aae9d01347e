package tensors

import "golang.org/x/sys/cpu"

// wide says whether this CPU can do what salsa16 and poly8 do.
var wide = cpu.X86.HasAVX512F && cpu.X86.HasAVX512DQ && cpu.X86.HasAVX512IFMA

// salsa16 crypts groups of sixteen blocks at p with Salsa20/20 from the state of
// the first block on, whose number's low half must not come to its end.
//
//go:noescape
func salsa16(p *byte, groups int, words *[16]uint32)

// poly8 takes groups of eight blocks at p into eight sums of Poly1305, those in
// the order of polyOrder: each sum is multiplied by a number, of which by has the
// limbs, before its block is added. One group at least.
//
//go:noescape
func poly8(acc *[3][8]uint64, by *[5]uint64, p *byte, groups int)
