// Kernels for weights that stay on the device, a module of their own that is loaded when
// it is first needed: cuda/built/resident.fatbin.
#include "digest.cuh"

static_assert(sizeof(ow_digest_job) == 32 && sizeof(ow_digest_dim) == 16, "abi_digest.h must have no padding");

extern "C" __global__ void __launch_bounds__(OW_DIGEST_THREADS, OW_DIGEST_BLOCKS)
    ow_digest(const ow_digest_job* jobs, uint32_t n, uint64_t tiles, const ow_digest_dim* dims, uint64_t* sums) {
    uint32_t warps = gridDim.x * (OW_DIGEST_THREADS / 32), warp = blockIdx.x * (OW_DIGEST_THREADS / 32) + ow::warp_of_block();
    ow::digest_job(jobs, n, tiles, dims, sums, warp, warps);
}
