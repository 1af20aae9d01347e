// Declares work on a caller's stream: a table is copied or passed with the launch, kernels are launched, answers
// are copied back, and an event is recorded after them. Only owcu_wait_batch waits, and owcu_submit_batch if
// asked to. A stream that is being captured is refused with OWCU_CAPTURED.
#ifndef OWCU_BATCH_H
#define OWCU_BATCH_H

#include "../driver/context.h"

enum { OWCU_STEPS = 4, OWCU_ARGS = 5 };

// One launch.
struct owcu_step {
	owcu_handle kernel;
	uint64_t args[OWCU_ARGS]; // a 32-bit argument is the low half; a kernel ignores arguments that it does not take
	uint32_t grid, block, shared;
	uint32_t few; // the last argument is the table itself
};

struct owcu_batch {
	owcu_handle ctx;
	uint64_t stream;
	owcu_handle done;       // event
	owcu_ptr to;            // the table, on the device
	void *table;            // pinned
	uint64_t bytes; // of the table; 0 if nothing is copied
	uint64_t back, back_at; // number and offset of the table's bytes that are copied back after the kernels
	uint32_t wait; // wait until everything is done
	uint32_t nsteps;
	struct owcu_step steps[OWCU_STEPS];
};

// owcu_submit_batch queues all of it. If it fails, none of it is still running.
int owcu_submit_batch(const struct owcu_batch *b, struct owcu_error *e);
// owcu_wait_batch waits for a batch's event. After an error, -1, the work has also ended. OWCU_UNKNOWN says that
// the driver refused access to the context, and the work may still be running. On a lost device no work is left.
enum { OWCU_UNKNOWN = 1 };
int owcu_wait_batch(owcu_handle ctx, owcu_handle done, struct owcu_error *e);
// owcu_is_batch_done returns, without waiting, 1 if the work is done, 0 if it is not or its state is unknown, and
// -1 after an error: see owcu_wait_batch.
int owcu_is_batch_done(owcu_handle ctx, owcu_handle done, struct owcu_error *e);

#endif
