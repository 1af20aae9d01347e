//go:build owfake

// Compiles the host twins of the kernels, for the fake driver.
#include "../../../../cuda/crc_host.cc"
#include "../../../../cuda/move_host.cc"
#include "../../../../cuda/x16_host.cc"
#include "../../../../cuda/batch_host.cc"
#include "../../../../cuda/stream_host.cc"
#include "../../../../cuda/resident_host.cc"
