// A driver without a GPU, for tests (build tag owfake).
//
// "Device" memory is host memory between guard zones, poisoned when it is freed. Work on a stream runs as late as the
// rules allow: when a call or another stream waits for it. So a missing order shows as wrong bytes. Kernels are the
// host twins. They may only read device memory and pinned memory, although one of the two devices is coherent and could
// read more. Memory with an exported handle becomes an unnamed file, which other processes map.
//
// While a stream is being captured the driver is as strict as possible: every call destroys the capture, except calls
// that only queue work on other streams or come from a thread in the relaxed mode.
#ifndef OWCU_FAKE_H
#define OWCU_FAKE_H

#include "../driver/driver.h"

// owcu_fake_api is the table for owcu_use_table.
const struct owcu_api *owcu_fake_api(void);

// owcu_fake_reset clears counts and failures, and sets the device memory to that many bytes.
void owcu_fake_reset(uint64_t memory);

// owcu_fake_fail makes the nth call from now (1: the next) return code. With sticky, every later call except those that
// free also fails, as after a lost device. With sticky 2 those fail as well, after they have freed. 0 means never.
void owcu_fake_fail(int64_t nth, int code, int sticky);

struct owcu_fake_state {
	int64_t calls; // since the last reset
	int64_t blocks, bytes, pins, streams, events, modules, contexts;
	int64_t broken;  // guard zones overwritten, rules broken, captures destroyed
	int64_t pending; // operations not done yet
	int64_t relaxed; // threads left in the relaxed capture mode
	int64_t waited; // calls that waited, or may have waited, for other work
	int64_t attached; // mapped allocations of other processes
	int64_t in_place; // bytes of chunks that kernels read in pinned memory, since the last reset
	char what[160];  // the first broken rule
};
void owcu_fake_get(struct owcu_fake_state *s);

// owcu_fake_history lists the driver functions called since the list was last cleared, as far as they fit, each with a
// newline.
void owcu_fake_history(char *to, size_t n, int forget);

// owcu_fake_version sets the version that the driver reports: 13000 after a reset.
void owcu_fake_version(int version, int devices);

// owcu_fake_fill queues a fill on a stream, as another user of the device would.
void owcu_fake_fill(owcu_ptr p, int v, uint64_t n, uint64_t stream);

// owcu_fake_capture begins or ends a capture in the global mode on a stream, or on another user's stream (0). With
// blocking, the legacy stream waits for it.
void owcu_fake_capture(uint64_t stream, int blocking, int on);

// owcu_fake_busy queues work on a stream that does not end by itself. A call that waits for it is counted, and returns.
void owcu_fake_busy(uint64_t stream);

// owcu_fake_idle ends all such work. It returns 0.
int owcu_fake_idle(void);

// owcu_fake_fork forks, calls the driver in the child as owcu_alloc and owcu_free do, and returns 0 if the child was
// refused before any call.
int owcu_fake_fork(owcu_handle ctx);
// owcu_fake_refuse_context makes the next calls that ask for the current context fail. Queued work goes on.
void owcu_fake_refuse_context(int times);

#endif
