// What loads and codecs need, as one module: cuda/built/x16.fatbin. resident.cu is another.
#include "x16_decode.cu"

#include "crc.cu"
#include "move.cu"
#include "batch.cu"
#include "stream.cu"
