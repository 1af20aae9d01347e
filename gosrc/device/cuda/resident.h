// A kernel of the second module, for weights that stay on the device, with its table: one
// call copies the table in, launches the kernel, copies the answers back and waits. A
// stream that is being captured is refused: OWCU_CAPTURED.
#ifndef OWCU_RESIDENT_H
#define OWCU_RESIDENT_H

#include "batch.h"

enum { OWCU_RESIDENT_ARGS = 8 };

struct owcu_resident {
	owcu_handle ctx;
	uint64_t stream;
	owcu_handle done;       // event
	owcu_ptr to;            // the table, on the device
	void *table;            // pinned
	uint64_t bytes;         // of the table
	uint64_t back, back_at; // the answers: their bytes, and where they stand
	owcu_handle kernel;
	uint32_t grid, block;
	uint64_t args[OWCU_RESIDENT_ARGS]; // an argument of 32 bits is the low half
};

// owcu_resident returns when all is done. If it fails, none of it is still running.
int owcu_resident(const struct owcu_resident *r, struct owcu_error *e);

#endif
