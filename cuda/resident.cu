// Kernels for weights that stay on the device. They are a separate module,
// cuda/built/resident.fatbin, which is loaded on first use.
#include "delta.cuh"
#include "digest.cuh"

static_assert(sizeof(ow_digest_job) == 32 && sizeof(ow_digest_dim) == 16, "abi_digest.h must have no padding");

// Kernels that compute digests (digest.cuh). The warps of the grid divide the tiles of all tensors evenly.
// Each warp adds the sums of its tiles to the sums of their tensors. No shared memory.
extern "C" __global__ void __launch_bounds__(OW_DIGEST_THREADS, OW_DIGEST_BLOCKS)
    ow_digest(const ow_digest_job* jobs, uint32_t n, uint64_t tiles, const ow_digest_dim* dims, uint64_t* sums) {
    uint32_t warps = gridDim.x * (OW_DIGEST_THREADS / 32), warp_id = blockIdx.x * (OW_DIGEST_THREADS / 32) + ow::warp_of_block();
    ow::digest_share<false>(jobs, n, tiles, dims, sums, warp_id, warps);
}

extern "C" __global__ void __launch_bounds__(OW_DIGEST_THREADS, OW_DIGEST_BLOCKS)
    ow_digest_keyed(const ow_digest_job* jobs, uint32_t n, uint64_t tiles, const ow_digest_dim* dims, uint64_t* sums) {
    uint32_t warps = gridDim.x * (OW_DIGEST_THREADS / 32), warp_id = blockIdx.x * (OW_DIGEST_THREADS / 32) + ow::warp_of_block();
    ow::digest_share<true>(jobs, n, tiles, dims, sums, warp_id, warps);
}

static_assert(sizeof(ow_delta_row) == 56, "abi_delta.h must have no padding");

// Calls f(row, shared) for each row of XOR deltas (delta.cuh), one warp per row, in a
// grid-stride loop. `shared` is the address of the warp's SHARED bytes of shared memory.
template <uint32_t SHARED, class F> static __device__ __forceinline__ void delta_rows(uint32_t n, F f) {
    __shared__ __align__(16) uint8_t shared[OW_DELTA_THREADS / 32 * SHARED];
    uint32_t warp_id = ow::warp_of_block(), at = (uint32_t)__cvta_generic_to_shared(shared) + warp_id * SHARED;
    for (uint32_t i = blockIdx.x * (OW_DELTA_THREADS / 32) + warp_id; i < n; i += gridDim.x * (OW_DELTA_THREADS / 32)) {
        f(i, at);
        ow::syncwarp();
    }
}

// Shared memory: the code table.
extern "C" __global__ void __launch_bounds__(OW_DELTA_THREADS) ow_delta_apply(const ow_delta_row* rows, uint32_t n) {
    delta_rows<OW_DELTA_TABLE>(n, [&](uint32_t i, uint32_t at) { ow::delta_apply(rows, i, at); });
}

// Shared memory of this kernel and of ow_delta_write: counts, codes and the queue of changes.
extern "C" __global__ void __launch_bounds__(OW_DELTA_THREADS) ow_delta_measure(ow_delta_row* rows, uint32_t n) {
    delta_rows<OW_DELTA_SHARED>(n, [&](uint32_t i, uint32_t at) { ow::delta_measure(rows, i, at); });
}

extern "C" __global__ void __launch_bounds__(OW_DELTA_THREADS) ow_delta_write(const ow_delta_row* rows, uint32_t n) {
    delta_rows<OW_DELTA_SHARED>(n, [&](uint32_t i, uint32_t at) { ow::delta_write(rows, i, at); });
}
