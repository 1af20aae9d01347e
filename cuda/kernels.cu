// The module of the kernels for loads and codecs: cuda/built/x16.fatbin. resident.cu is a
// second module.
//
// Start reading at warp.cuh (warp operations), abi.h (kernel arguments) and x16_decode.cuh
// (the decoder). Each <codec>_decode.cuh contains a kernel body. A *.cu file in this folder
// defines the kernel, and a *_host.cc file runs the body on the host.
#include "x16_decode.cu"

#include "crc.cu"
#include "move.cu"
#include "batch.cu"
#include "stream.cu"
