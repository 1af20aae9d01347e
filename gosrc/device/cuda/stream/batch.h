// Declares work on a caller's stream: a table is copied or passed with the launch, kernels are launched, results are
// copied back, and an event is recorded. Only owcu_wait_batch waits, and owcu_submit_batch if wait is set. A stream
// that is being captured is rejected with OWCU_CAPTURED.
#ifndef OWCU_BATCH_H
#define OWCU_BATCH_H

#include "../driver/context.h"

enum { OWCU_STEPS = 4, OWCU_ARGS = 5 };

// owcu_step is one kernel launch.
struct owcu_step {
	owcu_handle kernel;
	uint64_t args[OWCU_ARGS]; // a 32-bit argument is the low half; kernels ignore excess arguments
	uint32_t grid, block, shared;
	uint32_t few; // pass the table itself as the last argument
};

struct owcu_batch {
	owcu_handle ctx;
	uint64_t stream;
	owcu_handle done;       // event
	owcu_ptr to;            // device address of the table
	void *table;            // pinned
	uint64_t bytes; // bytes of the table to copy to the device
	uint64_t back, back_at; // number and offset of the table's bytes to copy back after the kernels
	uint32_t wait; // wait until all work has ended
	uint32_t nsteps;
	struct owcu_step steps[OWCU_STEPS];
};

// owcu_submit_batch queues a batch. If it fails, none of its work is still running.
int owcu_submit_batch(const struct owcu_batch *b, struct owcu_error *e);
// owcu_wait_batch waits for a batch's event. If it returns -1 after an error, the work has also ended. OWCU_UNKNOWN
// means that the driver denied access to the context, and the work may still be running. On a lost device, all work has
// ended.
enum { OWCU_UNKNOWN = 1 };
int owcu_wait_batch(owcu_handle ctx, owcu_handle done, struct owcu_error *e);
// owcu_is_batch_done returns, without waiting, 1 if the work has ended, 0 if it has not or its state is unknown, and
// -1 after an error. See owcu_wait_batch.
int owcu_is_batch_done(owcu_handle ctx, owcu_handle done, struct owcu_error *e);

#endif
