// Work on a stream of the caller's: a table is sent or goes with the launch, kernels are launched, and
// an event says when all of it is done. Nothing here waits but owcu_batch_wait.
#ifndef OWCU_BATCH_H
#define OWCU_BATCH_H

#include "lane.h"

// One launch: kernel(a, b, n, status, table), or kernel(b, n) of items. A kernel that
// takes no table by value ignores it.
struct owcu_step {
	owcu_handle kernel;
	owcu_ptr a, b;
	uint32_t n, grid, block, shared;
	uint32_t items;
};

enum { OWCU_STEPS = 4 };

struct owcu_batch {
	owcu_handle ctx;
	uint64_t stream;
	const uint64_t *after; // streams whose work comes first
	uint64_t nafter;
	owcu_handle join, done; // events
	owcu_ptr to;            // the table, on the device
	const void *table;      // pinned
	uint64_t bytes; // 0: nothing is sent
	owcu_ptr status; // words, of pinned memory
	uint32_t nsteps;
	struct owcu_step steps[OWCU_STEPS];
};

// owcu_batch queues it all. If it fails, nothing of it is still running.
int owcu_batch(const struct owcu_batch *b, struct owcu_error *e);
// owcu_batch_wait waits for an event; with ready it only looks, and says 1 for
// done and 0 for not yet.
int owcu_batch_wait(owcu_handle ctx, owcu_handle event, int *ready, struct owcu_error *e);

// owcu_kernels looks up kernels of a module, by names separated by NUL.
int owcu_kernels(owcu_handle ctx, owcu_handle module, const char *names, int count, owcu_handle *kernels, struct owcu_error *e);

// owcu_pad_new registers [host, host+n), asks for memory of the device, and
// makes events: all or nothing.
int owcu_pad_new(owcu_handle ctx, void *host, uint64_t n, uint64_t room, owcu_ptr *mapped, owcu_ptr *device, owcu_handle *events,
                 int count, struct owcu_error *e);
int owcu_pad_free(owcu_handle ctx, void *host, owcu_ptr device, owcu_handle *events, int count, struct owcu_error *e);

// owcu_copy queues a copy between any two places, after what is queued on
// `after` (as often as nafter), and with wait waits for it.
int owcu_copy(owcu_handle ctx, uint64_t stream, const uint64_t *after, uint64_t nafter, owcu_ptr dst, owcu_ptr src, uint64_t n,
              int wait, struct owcu_error *e);
// owcu_follow lets one stream wait for what is queued on another.
int owcu_follow(owcu_handle ctx, uint64_t stream, uint64_t after, struct owcu_error *e);
int owcu_stream_new(owcu_handle ctx, uint64_t *stream, struct owcu_error *e);
int owcu_stream_free(owcu_handle ctx, uint64_t stream, struct owcu_error *e);
int owcu_stream_sync(owcu_handle ctx, uint64_t stream, struct owcu_error *e);
// owcu_stream_here says whether a stream is of this context.
int owcu_stream_here(owcu_handle ctx, uint64_t stream, int *here, struct owcu_error *e);
// owcu_pointer_device is the number of the device that an address is of, or -1.
int owcu_pointer_device(owcu_ptr p);

#endif
