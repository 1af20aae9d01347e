// Measures the limit of a plain load to one GPU. Threads read blocks of a file from the page cache into pinned slots,
// two for each thread, and copy each to the GPU on the thread's own stream. Nothing is decoded or checked.
//
//   nvcc -O3 -std=c++17 -o copyways bench/gpu/copyways.cu && ./copyways FILE THREADS GPU
//
// Prints one JSON object: GB/s of the first pass and the median of the later ones, for each way of reading (pread, and
// memcpy from a mapping that was populated before) and each block size.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <vector>

static const int slots = 2, passes = 4;
static const size_t largest = 4 << 20;

static void check(bool ok, const char *what)
{
	if (!ok) {
		fprintf(stderr, "copyways: %s failed\n", what);
		exit(1);
	}
}

static double now()
{
	return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int main(int count, char **args)
{
	check(count == 4, "usage: copyways FILE THREADS GPU");
	int file = open(args[1], O_RDONLY), threads = atoi(args[2]), gpu = atoi(args[3]);
	struct stat about;
	check(file >= 0 && fstat(file, &about) == 0 && threads > 0, "opening the file");
	size_t size = about.st_size / largest * largest, pinned = threads * slots * largest;
	char *target, *host = (char *)aligned_alloc(largest, pinned);
	check(cudaSetDevice(gpu) == cudaSuccess && cudaMalloc(&target, size) == cudaSuccess, "cudaMalloc");
	madvise(host, pinned, MADV_HUGEPAGE);
	memset(host, 1, pinned);
	check(cudaHostRegister(host, pinned, 0) == cudaSuccess, "cudaHostRegister");
	std::vector<cudaStream_t> streams(threads);
	for (auto &stream : streams)
		cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
	char *mapped = (char *)mmap(0, size, PROT_READ, MAP_SHARED | MAP_POPULATE, file, 0);
	check(mapped != MAP_FAILED, "mmap");
	for (bool maps : {false, true})
		for (size_t block : {largest / 2, largest}) {
			std::vector<double> rates;
			for (int pass = 0; pass < passes; pass++) {
				std::atomic<size_t> next{0};
				std::vector<std::thread> workers;
				double began = now();
				for (int i = 0; i < threads; i++)
					workers.emplace_back([&, i] {
						cudaSetDevice(gpu);
						cudaEvent_t copied[slots];
						for (auto &event : copied)
							cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync);
						for (int n = 0;; n++) {
							size_t at = next.fetch_add(block);
							if (at >= size)
								break;
							char *slot = host + (i * slots + n % slots) * block;
							if (n >= slots)
								cudaEventSynchronize(copied[n % slots]);
							if (maps)
								memcpy(slot, mapped + at, block);
							else
								check(pread(file, slot, block, at) == (ssize_t)block, "pread");
							cudaMemcpyAsync(target + at, slot, block, cudaMemcpyHostToDevice, streams[i]);
							cudaEventRecord(copied[n % slots], streams[i]);
						}
						check(cudaStreamSynchronize(streams[i]) == cudaSuccess, "a copy");
						for (auto &event : copied)
							cudaEventDestroy(event);
					});
				for (auto &worker : workers)
					worker.join();
				rates.push_back(size / (now() - began) / 1e9);
			}
			std::sort(rates.begin() + 1, rates.end());
			printf("%s\"%s %zu MiB\": [%.2f, %.2f]", !maps && block < largest ? "{" : ", ", maps ? "map" : "pread", block >> 20,
			       rates[0], rates[passes / 2]);
		}
	printf("}\n");
}
