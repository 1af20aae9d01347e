// Everything that ships, as one module: cuda/built/x16.fatbin.
#include "x16_decode.cu"

#include "move.cu"
#include "batch.cu"
#include "stream.cu"
