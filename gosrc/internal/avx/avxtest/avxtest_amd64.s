//go:build goexperiment.simd

#include "textflag.h"

// func tells() bool
TEXT ·tells(SB), NOSPLIT, $0-1
	MOVB $0, ret+0(FP)
	MOVL $0, AX
	CPUID
	CMPL AX, $13
	JLT  no
	MOVL $1, AX
	MOVL $0, CX
	CPUID
	ANDL $0x18000000, CX // OSXSAVE and AVX
	CMPL CX, $0x18000000
	JNE  no
	MOVL $13, AX
	MOVL $1, CX
	CPUID
	SHRL $2, AX
	ANDL $1, AX
	MOVB AX, ret+0(FP)

no:
	RET

// func inUse() uint64
TEXT ·inUse(SB), NOSPLIT, $0-8
	MOVL $1, CX
	XGETBV
	SHLQ $32, DX
	ORQ  DX, AX
	MOVQ AX, ret+0(FP)
	RET

// func probe() (dirty, clean uint64)
TEXT ·probe(SB), NOSPLIT, $0-16
	VPCMPEQB X0, X0, X1
	VINSERTF128 $1, X1, Y0, Y0
	MOVL $1, CX
	XGETBV
	SHLQ $32, DX
	ORQ  DX, AX
	MOVQ AX, dirty+0(FP)
	VZEROUPPER
	MOVL $1, CX
	XGETBV
	SHLQ $32, DX
	ORQ  DX, AX
	MOVQ AX, clean+8(FP)
	RET

// func Dirty()
TEXT ·Dirty(SB), NOSPLIT, $0-0
	VPCMPEQB X0, X0, X1
	VINSERTF128 $1, X1, Y0, Y0
	RET
