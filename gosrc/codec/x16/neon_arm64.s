//go:build arm64 && !scalar

// The NEON decoder keeps the states of 32 lanes in V0 to V7, in order, four lanes per register.

#include "textflag.h"

// MLA adds the products of dwords, Vd += Vn * Vm. Go's assembler has no mnemonic for it.
#define MLA(m, n, d) WORD $(0x4EA09400 | (m)<<16 | (n)<<5 | (d))

// LANE computes the next states of four lanes: freq * (x >> 8) + rank. V23 has the frequencies and V21 the ranks of
// 16 lanes. index selects the bytes of these four lanes and extends them to dwords.
#define LANE(x, number, index) \
	VUSHR $8, x.S4, V24.S4; \
	VTBL  index.B16, [V23.B16], V25.B16; \
	VTBL  index.B16, [V21.B16], x.B16; \
	MLA(24, 25, number)

// STEP decodes one symbol in each of the 16 lanes of four registers and returns their values as bytes. The low byte
// of a state contains the bucket and the position. If the position is at or above the divider, the symbol is the
// bucket's alias, otherwise the bucket itself.
#define STEP(a, b, c, d, na, nb, nc, nd, out) \
	VUZP1 b.H8, a.H8, V21.H8; \
	VUZP1 d.H8, c.H8, V22.H8; \
	VUZP1 V22.B16, V21.B16, V21.B16; \
	VUSHR $4, V21.B16, V22.B16; \
	VAND  V17.B16, V21.B16, V21.B16; \
	VTBL  V22.B16, [V8.B16], V23.B16; \
	VTBL  V22.B16, [V9.B16], V24.B16; \
	VTBL  V22.B16, [V10.B16], V25.B16; \
	VUMAX V23.B16, V21.B16, V23.B16; \
	VCMEQ V21.B16, V23.B16, V23.B16; \
	VAND  V23.B16, V25.B16, V25.B16; \
	VADD  V25.B16, V21.B16, V21.B16; \
	VBIT  V23.B16, V24.B16, V22.B16; \
	VTBL  V22.B16, [V11.B16], V23.B16; \
	VTBL  V22.B16, [V12.B16], out.B16; \
	LANE(a, na, V13); \
	LANE(b, nb, V14); \
	LANE(c, nc, V15); \
	LANE(d, nd, V16)

// REFILL refills the lanes, of 8, whose states are below 2^16 with the next words from R1, and advances R1. R3 and R4
// are the tables ·expandNEON and ·bytesNEON.
#define REFILL(a, b) \
	VUZP1 b.H8, a.H8, V21.H8; \
	VUZP2 b.H8, a.H8, V22.H8; \
	VCMEQ V20.H8, V22.H8, V23.H8; \
	VAND  V18.B16, V23.B16, V24.B16; \
	VADDV V24.H8, V24; \
	VMOV  V24.H[0], R5; \
	ADD   R5<<4, R3, R6; \
	VLD1  (R6), [V24.B16]; \
	VLD1  (R1), [V25.B16]; \
	VTBL  V24.B16, [V25.B16], V24.B16; \
	MOVBU (R4)(R5), R6; \
	ADD   R6, R1, R1; \
	VBIT  V23.B16, V21.B16, V22.B16; \
	VBIT  V23.B16, V24.B16, V21.B16; \
	VZIP1 V22.H8, V21.H8, a.H8; \
	VZIP2 V22.H8, V21.H8, b.H8

// KEEP stores the values of two steps, V26 and V27, at R7, as pairs of bytes in the order of a tile's units.
#define KEEP \
	VTBL  V19.B16, [V26.B16], V26.B16; \
	VTBL  V19.B16, [V27.B16], V27.B16; \
	VZIP1 V27.B16, V26.B16, V28.B16; \
	VZIP2 V27.B16, V26.B16, V29.B16; \
	VST1.P [V28.B16, V29.B16], 32(R7)

// PUT writes a quarter of a tile: 8 units of 8 values, from the four pairs of steps.
#define PUT(quarter) \
	FMOVQ (16*quarter)(R8), F21; \
	FMOVQ (64+16*quarter)(R8), F22; \
	FMOVQ (128+16*quarter)(R8), F23; \
	FMOVQ (192+16*quarter)(R8), F24; \
	VST4.P [V21.H8, V22.H8, V23.H8, V24.H8], 64(R2)

// func tileNEON(states *[lanes]uint32, words *byte, t *tablesNEON, out *[tileSyms]byte) (used int)
TEXT ·tileNEON(SB), NOSPLIT, $256-40
	MOVD states+0(FP), R0
	MOVD words+8(FP), R1
	MOVD t+16(FP), R6
	MOVD out+24(FP), R2
	VLD1.P 64(R0), [V0.S4, V1.S4, V2.S4, V3.S4]
	VLD1 (R0), [V4.S4, V5.S4, V6.S4, V7.S4]
	VLD1.P 64(R6), [V8.B16, V9.B16, V10.B16, V11.B16]
	VLD1 (R6), [V12.B16]
	MOVD $·ordersNEON(SB), R6
	VLD1.P 64(R6), [V13.B16, V14.B16, V15.B16, V16.B16]
	VLD1 (R6), [V18.B16, V19.B16]
	VMOVI $15, V17.B16
	VMOVI $0, V20.B16
	MOVD $·expandNEON(SB), R3
	MOVD $·bytesNEON(SB), R4
	MOVD $kept-256(SP), R7
	MOVD R7, R8
	MOVD R1, R9
	MOVD $4, R10

pair:
	STEP(V0, V1, V2, V3, 0, 1, 2, 3, V26)
	STEP(V0, V1, V2, V3, 0, 1, 2, 3, V27)
	REFILL(V0, V1)
	REFILL(V2, V3)
	KEEP
	STEP(V4, V5, V6, V7, 4, 5, 6, 7, V26)
	STEP(V4, V5, V6, V7, 4, 5, 6, 7, V27)
	REFILL(V4, V5)
	REFILL(V6, V7)
	KEEP
	SUB  $1, R10
	CBNZ R10, pair

	PUT(0)
	PUT(1)
	PUT(2)
	PUT(3)
	VST1 [V4.S4, V5.S4, V6.S4, V7.S4], (R0)
	SUB  $64, R0
	VST1 [V0.S4, V1.S4, V2.S4, V3.S4], (R0)
	SUB  R9, R1
	MOVD R1, used+32(FP)
	RET

// UPPER computes the upper 16 bits of 16 floats in V4 and V5 from their exponents V0 and from V1, which is mantissa
// << 1 | sign. It rotates both together by 1.
#define UPPER \
	VZIP1 V0.B16, V1.B16, V2.B16; \
	VZIP2 V0.B16, V1.B16, V3.B16; \
	VUSHR $1, V2.H8, V4.H8; \
	VUSHR $1, V3.H8, V5.H8; \
	VSLI  $15, V2.H8, V4.H8; \
	VSLI  $15, V3.H8, V5.H8

// func mergeBF16NEON(dst, vals, plane *byte, n int)
TEXT ·mergeBF16NEON(SB), NOSPLIT, $0-32
	MOVD dst+0(FP), R0
	MOVD vals+8(FP), R1
	MOVD plane+16(FP), R2
	MOVD n+24(FP), R3

bf16:
	VLD1.P 16(R1), [V0.B16]
	VLD1.P 16(R2), [V1.B16]
	UPPER
	VST1.P [V4.B16, V5.B16], 32(R0)
	SUB  $16, R3
	CBNZ R3, bf16
	RET

// func mergeFP32NEON(dst, vals, high, middle, low *byte, n int)
TEXT ·mergeFP32NEON(SB), NOSPLIT, $0-48
	MOVD dst+0(FP), R0
	MOVD vals+8(FP), R1
	MOVD high+16(FP), R2
	MOVD middle+24(FP), R4
	MOVD low+32(FP), R5
	MOVD n+40(FP), R3

fp32:
	VLD1.P 16(R1), [V0.B16]
	VLD1.P 16(R2), [V1.B16]
	UPPER
	VLD1.P 16(R4), [V0.B16]
	VLD1.P 16(R5), [V1.B16]
	VZIP1 V0.B16, V1.B16, V6.B16
	VZIP2 V0.B16, V1.B16, V7.B16
	VZIP1 V4.H8, V6.H8, V8.H8
	VZIP2 V4.H8, V6.H8, V9.H8
	VZIP1 V5.H8, V7.H8, V10.H8
	VZIP2 V5.H8, V7.H8, V11.H8
	VST1.P [V8.B16, V9.B16, V10.B16, V11.B16], 64(R0)
	SUB  $16, R3
	CBNZ R3, fp32
	RET
