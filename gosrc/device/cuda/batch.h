// Work on a caller's stream: a table is copied or passed with the launch, kernels are
// launched, answers are copied back, and an event is recorded behind them. Only
// owcu_batch_wait waits, and what is asked to. A stream that is being captured is refused:
// OWCU_CAPTURED.
#ifndef OWCU_BATCH_H
#define OWCU_BATCH_H

#include "queue.h"

enum { OWCU_STEPS = 4, OWCU_ARGS = 5 };

// One launch.
struct owcu_step {
	owcu_handle kernel;
	uint64_t args[OWCU_ARGS]; // one of 32 bits is the low half; a kernel ignores those that it does not take
	uint32_t grid, block, shared;
	uint32_t few; // the last argument is the table itself
};

struct owcu_batch {
	owcu_handle ctx;
	uint64_t stream;
	owcu_handle done;       // event
	owcu_ptr to;            // the table, on the device
	void *table;            // pinned
	uint64_t bytes;         // of the table; 0: nothing is copied
	uint64_t back, back_at; // bytes of the table that are copied back after the kernels, and where they stand
	uint32_t wait;          // until all is done
	uint32_t nsteps;
	struct owcu_step steps[OWCU_STEPS];
};

// owcu_batch queues all of it. If it fails, none of it is still running.
int owcu_batch(const struct owcu_batch *b, struct owcu_error *e);
// owcu_batch_wait waits for an event; with ready it only checks, and returns 1 for
// done and 0 for not yet.
int owcu_batch_wait(owcu_handle ctx, owcu_handle event, int *ready, struct owcu_error *e);

// owcu_follow makes a stream wait for what is queued on others, by an event that is
// made at the first call; only one caller may use it at a time.
int owcu_follow(owcu_handle ctx, owcu_handle *event, uint64_t stream, const uint64_t *after, uint64_t nafter, struct owcu_error *e);
// owcu_copy queues a copy between any two addresses; with wait it waits for it.
int owcu_copy(owcu_handle ctx, uint64_t stream, owcu_ptr dst, owcu_ptr src, uint64_t n, int wait, struct owcu_error *e);
// owcu_copy_rows queues a copy of rows between device memory of this process or of
// others that it has mapped.
int owcu_copy_rows(owcu_handle ctx, uint64_t stream, owcu_ptr dst, uint64_t dst_pitch, owcu_ptr src, uint64_t src_pitch, uint64_t width,
		   uint64_t rows, struct owcu_error *e);
int owcu_stream_new(owcu_handle ctx, uint64_t *stream, struct owcu_error *e);
int owcu_stream_free(owcu_handle ctx, uint64_t stream, struct owcu_error *e);
int owcu_stream_sync(owcu_handle ctx, uint64_t stream, struct owcu_error *e);
// owcu_stream_here checks whether a stream belongs to this context.
int owcu_stream_here(owcu_handle ctx, uint64_t stream, int *here, struct owcu_error *e);
// owcu_thread_mode exchanges the thread's mode of stream capture, or returns -1.
int owcu_thread_mode(int mode);
// owcu_pointer_device is the number of the device that an address belongs to, or
// -1.
int owcu_pointer_device(owcu_ptr p);

// owcu_share names an allocation for other processes, and owcu_attach maps one of another
// process, until owcu_drop.
int owcu_share(owcu_handle ctx, owcu_ptr p, struct owcu_ipc *handle, struct owcu_error *e);
int owcu_attach(owcu_handle ctx, const struct owcu_ipc *handle, owcu_ptr *p, struct owcu_error *e);

#endif
