#include "textflag.h"

// SHA-256 of sixteen messages at once: lane i of every register belongs to
// message i. The state a..h is in Z0..Z7, the last sixteen words of the message
// schedule in Z16..Z31 (in the order that the transposition leaves them in),
// Z8..Z13 are free.

#define W0 Z16
#define W1 Z18
#define W2 Z17
#define W3 Z19
#define W4 Z20
#define W5 Z22
#define W6 Z21
#define W7 Z23
#define W8 Z24
#define W9 Z26
#define W10 Z25
#define W11 Z27
#define W12 Z28
#define W13 Z30
#define W14 Z29
#define W15 Z31

// ROUND takes word w and the constant at byte k of CX.
#define ROUND(a, b, c, d, e, f, g, h, w, k) \
	VPADDD      w, h, h           \
	VPADDD.BCST k(CX), h, h       \
	VPRORD      $6, e, Z8         \
	VPRORD      $11, e, Z9        \
	VPRORD      $25, e, Z10       \
	VPTERNLOGD  $0x96, Z10, Z9, Z8 \
	VMOVDQA64   e, Z11            \
	VPTERNLOGD  $0xCA, g, f, Z11  \ // e ? f : g
	VPADDD      Z8, h, h          \
	VPADDD      Z11, h, h         \
	VPADDD      h, d, d           \
	VPRORD      $2, a, Z8         \
	VPRORD      $13, a, Z9        \
	VPRORD      $22, a, Z10       \
	VPTERNLOGD  $0x96, Z10, Z9, Z8 \
	VMOVDQA64   a, Z11            \
	VPTERNLOGD  $0xE8, c, b, Z11  \ // majority
	VPADDD      Z8, h, h          \
	VPADDD      Z11, h, h

// NEXT turns word t of the schedule into word t+16.
#define NEXT(w0, w1, w9, w14) \
	VPRORD     $7, w1, Z8         \
	VPRORD     $18, w1, Z9        \
	VPSRLD     $3, w1, Z10        \
	VPTERNLOGD $0x96, Z10, Z9, Z8 \
	VPRORD     $17, w14, Z11      \
	VPRORD     $19, w14, Z12      \
	VPSRLD     $10, w14, Z13      \
	VPTERNLOGD $0x96, Z13, Z12, Z11 \
	VPADDD     w9, w0, w0         \
	VPADDD     Z8, w0, w0         \
	VPADDD     Z11, w0, w0

// LOAD gets a block of message i: big-endian words.
#define LOAD(i, z) \
	MOVQ      (8*i)(SI), R8     \
	VMOVDQU32 (R8)(DX*1), z     \
	VPSHUFB   Z15, z, z

#define PAIR(low, high, x, y) \
	low       y, x, Z8 \
	high      y, x, y  \
	VMOVDQA64 Z8, x

// QUAD turns four rows into four columns within each 128 bits, the second and
// the third of them exchanged.
#define QUAD(r0, r1, r2, r3) \
	PAIR(VPUNPCKLDQ, VPUNPCKHDQ, r0, r1)   \
	PAIR(VPUNPCKLDQ, VPUNPCKHDQ, r2, r3)   \
	PAIR(VPUNPCKLQDQ, VPUNPCKHQDQ, r0, r2) \
	PAIR(VPUNPCKLQDQ, VPUNPCKHQDQ, r1, r3)

// CROSS does so with the 128 bits of four registers.
#define CROSS(a, b, c, d) \
	VSHUFI32X4 $0x44, b, a, Z8   \
	VSHUFI32X4 $0xEE, b, a, Z9   \
	VSHUFI32X4 $0x44, d, c, Z10  \
	VSHUFI32X4 $0xEE, d, c, Z11  \
	VSHUFI32X4 $0x88, Z10, Z8, a \
	VSHUFI32X4 $0xDD, Z10, Z8, b \
	VSHUFI32X4 $0x88, Z11, Z9, c \
	VSHUFI32X4 $0xDD, Z11, Z9, d

// func blocks(state *[8][16]uint32, from *[16]unsafe.Pointer, n int)
TEXT ·blocks(SB), NOSPLIT, $0-24
	MOVQ state+0(FP), DI
	MOVQ from+8(FP), SI
	MOVQ n+16(FP), BX
	XORQ DX, DX
	VBROADCASTI32X4 swap<>(SB), Z15
	VMOVDQU32 (DI), Z0
	VMOVDQU32 64(DI), Z1
	VMOVDQU32 128(DI), Z2
	VMOVDQU32 192(DI), Z3
	VMOVDQU32 256(DI), Z4
	VMOVDQU32 320(DI), Z5
	VMOVDQU32 384(DI), Z6
	VMOVDQU32 448(DI), Z7

block:
	TESTQ BX, BX
	JZ    done
	LOAD(0, Z16)
	LOAD(1, Z17)
	LOAD(2, Z18)
	LOAD(3, Z19)
	QUAD(Z16, Z17, Z18, Z19)
	LOAD(4, Z20)
	LOAD(5, Z21)
	LOAD(6, Z22)
	LOAD(7, Z23)
	QUAD(Z20, Z21, Z22, Z23)
	LOAD(8, Z24)
	LOAD(9, Z25)
	LOAD(10, Z26)
	LOAD(11, Z27)
	QUAD(Z24, Z25, Z26, Z27)
	LOAD(12, Z28)
	LOAD(13, Z29)
	LOAD(14, Z30)
	LOAD(15, Z31)
	QUAD(Z28, Z29, Z30, Z31)
	CROSS(Z16, Z20, Z24, Z28)
	CROSS(Z17, Z21, Z25, Z29)
	CROSS(Z18, Z22, Z26, Z30)
	CROSS(Z19, Z23, Z27, Z31)

	LEAQ constants<>(SB), CX
	MOVQ $3, AX

sixteen:
	ROUND(Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7, W0, 0)
	NEXT(W0, W1, W9, W14)
	ROUND(Z7, Z0, Z1, Z2, Z3, Z4, Z5, Z6, W1, 4)
	NEXT(W1, W2, W10, W15)
	ROUND(Z6, Z7, Z0, Z1, Z2, Z3, Z4, Z5, W2, 8)
	NEXT(W2, W3, W11, W0)
	ROUND(Z5, Z6, Z7, Z0, Z1, Z2, Z3, Z4, W3, 12)
	NEXT(W3, W4, W12, W1)
	ROUND(Z4, Z5, Z6, Z7, Z0, Z1, Z2, Z3, W4, 16)
	NEXT(W4, W5, W13, W2)
	ROUND(Z3, Z4, Z5, Z6, Z7, Z0, Z1, Z2, W5, 20)
	NEXT(W5, W6, W14, W3)
	ROUND(Z2, Z3, Z4, Z5, Z6, Z7, Z0, Z1, W6, 24)
	NEXT(W6, W7, W15, W4)
	ROUND(Z1, Z2, Z3, Z4, Z5, Z6, Z7, Z0, W7, 28)
	NEXT(W7, W8, W0, W5)
	ROUND(Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7, W8, 32)
	NEXT(W8, W9, W1, W6)
	ROUND(Z7, Z0, Z1, Z2, Z3, Z4, Z5, Z6, W9, 36)
	NEXT(W9, W10, W2, W7)
	ROUND(Z6, Z7, Z0, Z1, Z2, Z3, Z4, Z5, W10, 40)
	NEXT(W10, W11, W3, W8)
	ROUND(Z5, Z6, Z7, Z0, Z1, Z2, Z3, Z4, W11, 44)
	NEXT(W11, W12, W4, W9)
	ROUND(Z4, Z5, Z6, Z7, Z0, Z1, Z2, Z3, W12, 48)
	NEXT(W12, W13, W5, W10)
	ROUND(Z3, Z4, Z5, Z6, Z7, Z0, Z1, Z2, W13, 52)
	NEXT(W13, W14, W6, W11)
	ROUND(Z2, Z3, Z4, Z5, Z6, Z7, Z0, Z1, W14, 56)
	NEXT(W14, W15, W7, W12)
	ROUND(Z1, Z2, Z3, Z4, Z5, Z6, Z7, Z0, W15, 60)
	NEXT(W15, W0, W8, W13)
	ADDQ $64, CX
	DECQ AX
	JNZ  sixteen

	ROUND(Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7, W0, 0)
	ROUND(Z7, Z0, Z1, Z2, Z3, Z4, Z5, Z6, W1, 4)
	ROUND(Z6, Z7, Z0, Z1, Z2, Z3, Z4, Z5, W2, 8)
	ROUND(Z5, Z6, Z7, Z0, Z1, Z2, Z3, Z4, W3, 12)
	ROUND(Z4, Z5, Z6, Z7, Z0, Z1, Z2, Z3, W4, 16)
	ROUND(Z3, Z4, Z5, Z6, Z7, Z0, Z1, Z2, W5, 20)
	ROUND(Z2, Z3, Z4, Z5, Z6, Z7, Z0, Z1, W6, 24)
	ROUND(Z1, Z2, Z3, Z4, Z5, Z6, Z7, Z0, W7, 28)
	ROUND(Z0, Z1, Z2, Z3, Z4, Z5, Z6, Z7, W8, 32)
	ROUND(Z7, Z0, Z1, Z2, Z3, Z4, Z5, Z6, W9, 36)
	ROUND(Z6, Z7, Z0, Z1, Z2, Z3, Z4, Z5, W10, 40)
	ROUND(Z5, Z6, Z7, Z0, Z1, Z2, Z3, Z4, W11, 44)
	ROUND(Z4, Z5, Z6, Z7, Z0, Z1, Z2, Z3, W12, 48)
	ROUND(Z3, Z4, Z5, Z6, Z7, Z0, Z1, Z2, W13, 52)
	ROUND(Z2, Z3, Z4, Z5, Z6, Z7, Z0, Z1, W14, 56)
	ROUND(Z1, Z2, Z3, Z4, Z5, Z6, Z7, Z0, W15, 60)

	VPADDD (DI), Z0, Z0
	VPADDD 64(DI), Z1, Z1
	VPADDD 128(DI), Z2, Z2
	VPADDD 192(DI), Z3, Z3
	VPADDD 256(DI), Z4, Z4
	VPADDD 320(DI), Z5, Z5
	VPADDD 384(DI), Z6, Z6
	VPADDD 448(DI), Z7, Z7
	VMOVDQU32 Z0, (DI)
	VMOVDQU32 Z1, 64(DI)
	VMOVDQU32 Z2, 128(DI)
	VMOVDQU32 Z3, 192(DI)
	VMOVDQU32 Z4, 256(DI)
	VMOVDQU32 Z5, 320(DI)
	VMOVDQU32 Z6, 384(DI)
	VMOVDQU32 Z7, 448(DI)
	ADDQ $64, DX
	DECQ BX
	JMP  block

done:
	VZEROUPPER
	RET

DATA swap<>+0(SB)/8, $0x0405060700010203
DATA swap<>+8(SB)/8, $0x0C0D0E0F08090A0B
GLOBL swap<>(SB), RODATA|NOPTR, $16

DATA constants<>+0(SB)/8, $0x71374491428a2f98
DATA constants<>+8(SB)/8, $0xe9b5dba5b5c0fbcf
DATA constants<>+16(SB)/8, $0x59f111f13956c25b
DATA constants<>+24(SB)/8, $0xab1c5ed5923f82a4
DATA constants<>+32(SB)/8, $0x12835b01d807aa98
DATA constants<>+40(SB)/8, $0x550c7dc3243185be
DATA constants<>+48(SB)/8, $0x80deb1fe72be5d74
DATA constants<>+56(SB)/8, $0xc19bf1749bdc06a7
DATA constants<>+64(SB)/8, $0xefbe4786e49b69c1
DATA constants<>+72(SB)/8, $0x240ca1cc0fc19dc6
DATA constants<>+80(SB)/8, $0x4a7484aa2de92c6f
DATA constants<>+88(SB)/8, $0x76f988da5cb0a9dc
DATA constants<>+96(SB)/8, $0xa831c66d983e5152
DATA constants<>+104(SB)/8, $0xbf597fc7b00327c8
DATA constants<>+112(SB)/8, $0xd5a79147c6e00bf3
DATA constants<>+120(SB)/8, $0x1429296706ca6351
DATA constants<>+128(SB)/8, $0x2e1b213827b70a85
DATA constants<>+136(SB)/8, $0x53380d134d2c6dfc
DATA constants<>+144(SB)/8, $0x766a0abb650a7354
DATA constants<>+152(SB)/8, $0x92722c8581c2c92e
DATA constants<>+160(SB)/8, $0xa81a664ba2bfe8a1
DATA constants<>+168(SB)/8, $0xc76c51a3c24b8b70
DATA constants<>+176(SB)/8, $0xd6990624d192e819
DATA constants<>+184(SB)/8, $0x106aa070f40e3585
DATA constants<>+192(SB)/8, $0x1e376c0819a4c116
DATA constants<>+200(SB)/8, $0x34b0bcb52748774c
DATA constants<>+208(SB)/8, $0x4ed8aa4a391c0cb3
DATA constants<>+216(SB)/8, $0x682e6ff35b9cca4f
DATA constants<>+224(SB)/8, $0x78a5636f748f82ee
DATA constants<>+232(SB)/8, $0x8cc7020884c87814
DATA constants<>+240(SB)/8, $0xa4506ceb90befffa
DATA constants<>+248(SB)/8, $0xc67178f2bef9a3f7
GLOBL constants<>(SB), RODATA|NOPTR, $256
