// What loads and codecs need, as one module: cuda/built/x16.fatbin. resident.cu is another.
//
// Where to begin: warp.cuh is what a warp can do, abi.h what a launch gets, x16_decode.cuh
// the decoder. Each <codec>_decode.cuh has a kernel's body, which a *.cu file here launches
// and a *_host.cc file runs on the host.
#include "x16_decode.cu"

#include "crc.cu"
#include "move.cu"
#include "batch.cu"
#include "stream.cu"
