// A driver without a GPU, for tests (build tag owfake).
//
// "Device" memory is host memory between guard zones, and is poisoned when it is freed. Work on a stream runs as late
// as the rules allow, which is when a call or another stream waits for it. A missing dependency therefore shows as
// wrong bytes. Kernels are the host twins. They may only read device memory and pinned memory, although one of the two
// devices is coherent and could read more. Memory with an exported handle becomes an unnamed file, which other
// processes map.
//
// While a stream is being captured, the driver is as strict as possible: every call destroys the capture, except for
// calls that only queue work on other streams or come from a thread in the relaxed mode.
#ifndef OWCU_FAKE_H
#define OWCU_FAKE_H

#include "../driver/driver.h"

// owcu_fake_api is the table for owcu_use_table.
const struct owcu_api *owcu_fake_api(void);

// owcu_fake_reset clears counts and failures, and sets the size of device memory in bytes.
void owcu_fake_reset(uint64_t memory);

// owcu_fake_fail makes the nth call from now (1 is the next) return code. With sticky 1, all later calls except those
// that free resources also fail, as on a lost device. With sticky 2, calls that free resources also return
// code, but still free them. If nth is 0, no call fails.
void owcu_fake_fail(int64_t nth, int code, int sticky);

struct owcu_fake_state {
	int64_t calls; // since the last reset
	int64_t blocks, bytes, pins, streams, events, modules, contexts;
	int64_t broken;  // guard zones overwritten, rules broken, captures destroyed
	int64_t pending; // operations that have not ended
	int64_t relaxed; // threads that are still in the relaxed capture mode
	int64_t waited; // calls that waited, or could have waited, for other work
	int64_t attached; // mapped allocations of other processes
	int64_t in_place; // bytes of chunks that kernels read in pinned memory, since the last reset
	char what[160];  // the first broken rule
};
void owcu_fake_get(struct owcu_fake_state *s);

// owcu_fake_history writes the names of the driver functions called since the list was last cleared, each with a
// newline, as far as they fit. forget clears the list.
void owcu_fake_history(char *to, size_t n, int forget);

// owcu_fake_version sets the version that the driver reports (13000 after a reset) and the number of devices.
void owcu_fake_version(int version, int devices);

// owcu_fake_fill queues a fill on a stream, like another user of the device.
void owcu_fake_fill(owcu_ptr p, int v, uint64_t n, uint64_t stream);

// owcu_fake_capture begins or ends a capture in the global mode on a stream, or on another user's stream (0). If
// blocking is set, the legacy stream waits for the captured stream.
void owcu_fake_capture(uint64_t stream, int blocking, int on);

// owcu_fake_busy queues work on a stream that ends only with owcu_fake_idle. A call that waits for it is counted and
// returns.
void owcu_fake_busy(uint64_t stream);

// owcu_fake_idle ends all work of owcu_fake_busy. It returns 0.
int owcu_fake_idle(void);

// owcu_fake_fork forks, calls owcu_alloc and owcu_free in the child, and returns 0 if they returned an error before
// calling the driver.
int owcu_fake_fork(owcu_handle ctx);
// owcu_fake_refuse_context makes the next calls that get the current context fail. Queued work continues.
void owcu_fake_refuse_context(int times);

#endif
