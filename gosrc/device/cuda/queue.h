// What Go asks of the driver, several driver calls to one cgo call.
//
// Every function makes the device's context current while it runs and restores what
// was current before: it may run on a thread of Python's, where torch has chosen a
// device. Meanwhile its thread is in the relaxed mode of stream capture, so that no
// call destroys a graph that another thread, or this one, is capturing. After an
// error the remaining calls are skipped, and e says which call failed and how.
#ifndef OWCU_QUEUE_H
#define OWCU_QUEUE_H

#include "driver.h"

struct owcu_error {
	const char *call; // NULL: none
	int code;
	char text[120]; // the driver's name and text of the code
};

// Streams of a queue: one copies, the others compute. A piece decodes in a few
// blocks whose latency is longer than its copy, so several are in flight.
enum { OWCU_STREAMS = 6 };

struct owcu_copy {
	owcu_ptr dst;
	const void *src;
	uint64_t n;
};

// One launch of a kernel. All kernels take two tables, a number of items, eight
// warps a block and an item a warp, and the status words.
struct owcu_launch {
	uint32_t kernel, n;
	owcu_ptr a, b;
};

enum { OWCU_COPIES = 4096, OWCU_LAUNCHES = 128, OWCU_KERNELS = 11 };

// What a slot does next. Go fills it while it owns the slot.
struct owcu_slot {
	owcu_handle copied, done; // events
	owcu_handle after, then; // the caller's, or 0: wait for after before writing, record then at the end
	owcu_ptr status;
	uint32_t ncopies, nlaunches, stream, early, wait; // early: copies write to destinations; wait: return when all is done
	// While the queue is timed: events before and after the copies and the
	// launches, and their milliseconds since the origin once they were waited for.
	owcu_handle marks[4];
	float at[4];
	struct owcu_copy copies[OWCU_COPIES];
	struct owcu_launch launches[OWCU_LAUNCHES];
};

// A pad is pinned memory of the host, memory of the device, and streams and events.
struct owcu_pad {
	void *host;      // registered
	owcu_ptr mapped; // its address on the device
	owcu_ptr device; // 0: none
	owcu_handle *streams, *events;
	int nstreams, nevents;
};

struct owcu_queue {
	owcu_handle ctx;
	struct owcu_pad pad; // stream 0 copies; the device's memory is the staging
	owcu_handle kernels[OWCU_KERNELS];
	owcu_handle join; // event for WaitFor
	owcu_ptr scratch;
	struct owcu_slot **slots;
	int made, nslots; // slots that were made, and those in use
	int ordered; // a submit with `then` has used a kernel: those that follow end behind it
	int prompt; // owcu_wait asks again and again for a while, before it sleeps
	owcu_handle origin; // event from which the slots' marks are measured
	int timed;
};

struct owcu_info {
	char name[128], bus[32];
	int major, minor, sms, coherent;
	uint64_t memory;
};

int owcu_begin(int *version, int *count, struct owcu_error *e);
int owcu_info_get(int ordinal, struct owcu_info *info, struct owcu_error *e);
// owcu_ctx_open also says what owcu_info does of the device.
int owcu_ctx_open(int ordinal, int *device, owcu_handle *ctx, int *coherent, int *sms, struct owcu_error *e);
int owcu_ctx_close(int device, struct owcu_error *e);

// A guard keeps the thread's state that owcu_enter changed.
struct owcu_guard {
	owcu_handle before, ctx;
	int mode;
};

// owcu_enter makes the context current on this thread and its capture mode relaxed,
// and owcu_leave restores both: for calls of other libraries in between. After an
// error there is nothing to restore.
int owcu_enter(struct owcu_guard *g, owcu_handle ctx, struct owcu_error *e);
void owcu_leave(struct owcu_guard *g);

// owcu_alloc allocates all n pieces or none. After an error out has those that the
// driver refused to free, for owcu_free later, and 0 elsewhere.
int owcu_alloc(owcu_handle ctx, int64_t n, const uint64_t *sizes, owcu_ptr *out, struct owcu_error *e);
// owcu_free frees n pieces that no work uses, and writes 0 over those that are
// gone. It continues after an error and reports the first; on a lost device
// everything is gone.
int owcu_free(owcu_handle ctx, int64_t n, owcu_ptr *p, struct owcu_error *e);
// owcu_mark records an event on each of n streams, and makes missing events. It
// returns 1, and the events mean nothing, while one of the streams is being
// captured.
int owcu_mark(owcu_handle ctx, int n, const uint64_t *streams, owcu_handle *events, struct owcu_error *e);
// owcu_passed returns 1 when all work before the events is done, else 0. It does
// not wait.
int owcu_passed(owcu_handle ctx, int n, const owcu_handle *events, struct owcu_error *e);
// owcu_register pins [p, p+n) for every context of the process.
int owcu_register(owcu_handle ctx, void *p, uint64_t n, struct owcu_error *e);
// owcu_drop frees a thing that nothing uses, unless it is NULL. It returns 1 if the
// driver refused and may not the next time. On a lost device it is gone.
enum { OWCU_EVENT, OWCU_STREAM, OWCU_PINNED /* by owcu_register */, OWCU_ATTACHED /* by owcu_attach */ };
int owcu_drop(owcu_handle ctx, int what, void *thing, struct owcu_error *e);
int owcu_memory(owcu_handle ctx, uint64_t *unused, uint64_t *total, struct owcu_error *e);
// owcu_read copies on a stream of its own, which it makes at its first call.
int owcu_read(owcu_handle ctx, owcu_handle *stream, void *dst, owcu_ptr src, uint64_t n, struct owcu_error *e);

// owcu_module loads an image, of which it keeps a copy until it is closed, and
// looks up kernels by names, which are separated by NUL. After an error it may be
// opened again; m is zero the first time. Closing it returns 1 as owcu_drop does.
struct owcu_module {
	owcu_handle module;
	void *image;
};
int owcu_module_open(owcu_handle ctx, const void *image, uint64_t n, const char *names, int count, struct owcu_module *m,
                     owcu_handle *kernels, struct owcu_error *e);
int owcu_module_close(owcu_handle ctx, struct owcu_module *m, struct owcu_error *e);

// owcu_pad_new registers [host, host+n), allocates `room` bytes of the device (0: none),
// and makes streams and events, for the first of which (sleepers) waiting threads sleep and
// for the others spin: all or nothing. p is zero. -1: nothing is left; 1: the driver refused to free some of it, for owcu_pad_free.
// That waits for the streams' work, returns 1 for the same reason, and may be called again.
int owcu_pad_new(owcu_handle ctx, struct owcu_pad *p, void *host, uint64_t n, uint64_t room, int nstreams, int nevents, int sleepers,
                 struct owcu_error *e);
int owcu_pad_free(owcu_handle ctx, struct owcu_pad *p, struct owcu_error *e);

// owcu_queue_new registers [pinned, pinned+bytes) and makes the streams and events of
// a queue and, if `staged`, its staging; on an error it returns NULL and leaves nothing
// behind.
// owcu_queue_free unregisters; the caller keeps the memory itself. The user of the
// slots sets their number, and where the status words of each are. If the driver
// refuses to free what was made before an error, that is *left, for
// owcu_queue_free.
struct owcu_queue *owcu_queue_new(owcu_handle ctx, void *pinned, uint64_t bytes, int nslots, int staged,
                                const owcu_handle *kernels, struct owcu_queue **left, struct owcu_error *e);
// owcu_queue_free returns 1 if the driver refused some of it: then it may be called
// again, for the rest. Otherwise the queue is gone, and so is its registration.
int owcu_queue_free(struct owcu_queue *q, struct owcu_error *e);
// owcu_queue_more allocates a queue's scratch or staging, which go with the queue.
int owcu_queue_more(struct owcu_queue *q, owcu_ptr *which, uint64_t n, struct owcu_error *e);

// owcu_submit queues the work of a slot. If it fails, none of that work is still
// running when it returns.
int owcu_submit(struct owcu_queue *q, int slot, struct owcu_error *e);
// owcu_wait waits for the slot's last submit.
int owcu_wait(struct owcu_queue *q, int slot, struct owcu_error *e);
// owcu_join makes the queue wait for what is queued now on a caller's stream.
int owcu_join(struct owcu_queue *q, uint64_t stream, struct owcu_error *e);

// owcu_event_new makes an event without times; owcu_event_before makes a stream wait for
// its last record.
int owcu_event_new(owcu_handle ctx, owcu_handle *event, struct owcu_error *e);
int owcu_event_before(owcu_handle ctx, owcu_handle event, uint64_t stream, struct owcu_error *e);

// owcu_again launches the kernels of every slot's last submit again, count times,
// and waits; it copies nothing. The caller owns the slots, and their destinations
// are still allocated.
int owcu_again(struct owcu_queue *q, int count, struct owcu_error *e);

// owcu_timing turns the marks of the slots on, with the origin now, or off. No work
// may be in flight. Off, they cost a comparison.
int owcu_timing(struct owcu_queue *q, int on, struct owcu_error *e);

// owcu_list_new makes the head of a list of blocks without a holder; owcu_list_take
// empties it.
void **owcu_list_new(void);
void *owcu_list_take(void **list);

#endif
