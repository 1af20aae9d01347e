// What Go asks of the driver, several driver calls to one crossing.
//
// Every function makes the device's context current for its own duration and
// puts back what was current before: it may run on a thread of Python's, where
// torch has a device of its own chosen. For as long its thread is in the relaxed
// mode of stream capture, so that no call harms a graph that another thread, or
// this one, is capturing. On an error the rest of the calls is left out, and e
// says which call failed and how.
#ifndef OWCU_LANE_H
#define OWCU_LANE_H

#include "driver.h"

struct owcu_error {
	const char *call; // NULL: none
	int code;
	char text[120]; // the driver's name and words for the code
};

// Streams of a lane: one copies, the others compute. A piece decodes in a few
// blocks whose latency is longer than its copy, so several are under way.
enum { OWCU_STREAMS = 6 };

struct owcu_copy {
	owcu_ptr dst;
	const void *src;
	uint64_t n;
};

// One launch of a kernel of ours: they all take two tables, a number of items,
// eight warps a block and an item a warp, and the status words.
struct owcu_launch {
	uint32_t kernel, n;
	owcu_ptr a, b;
};

enum { OWCU_COPIES = 4096, OWCU_LAUNCHES = 128, OWCU_KERNELS = 10 };

// What a slot is to do next. Go fills it while it owns the slot.
struct owcu_slot {
	owcu_handle copied, done; // events
	owcu_handle after, then; // someone else's, or 0: before what is written, and when it is done
	owcu_ptr status;
	uint32_t ncopies, nlaunches, stream, early, wait; // early: copies write; wait: return when all of it is done
	// While the lane is timed: events before and after the copies and the
	// launches, and their milliseconds since the origin once it was waited for.
	owcu_handle marks[4];
	float at[4];
	struct owcu_copy copies[OWCU_COPIES];
	struct owcu_launch launches[OWCU_LAUNCHES];
};

struct owcu_lane {
	owcu_handle ctx;
	owcu_handle streams[OWCU_STREAMS]; // 0 copies
	owcu_handle kernels[OWCU_KERNELS];
	owcu_handle join; // event for WaitFor
	void *pinned;     // registered
	owcu_ptr mapped;  // the same, for the device
	owcu_ptr staging, scratch;
	struct owcu_slot **slots;
	int made, nslots; // slots that there are, and that are in use
	owcu_handle origin; // event from which the slots' marks are counted
	int timed;
};

struct owcu_info {
	char name[128], bus[32];
	int major, minor, sms;
	uint64_t memory;
};

int owcu_begin(int *version, int *count, struct owcu_error *e);
int owcu_info_get(int ordinal, struct owcu_info *info, struct owcu_error *e);
int owcu_ctx_open(int ordinal, int *device, owcu_handle *ctx, struct owcu_error *e);
int owcu_ctx_close(int device, struct owcu_error *e);

// A guard keeps what owcu_enter changed on a thread.
struct owcu_guard {
	owcu_handle before, ctx;
	int mode;
};

// owcu_enter makes the context current on this thread and its mode of capture
// relaxed, and owcu_leave puts back what was: for calls of other libraries in
// between. After an error there is nothing to put back.
int owcu_enter(struct owcu_guard *g, owcu_handle ctx, struct owcu_error *e);
void owcu_leave(struct owcu_guard *g);

// owcu_alloc gets all n pieces or none. After an error out has what the driver
// refused to take back, for owcu_free later, and 0 else.
int owcu_alloc(owcu_handle ctx, int64_t n, const uint64_t *sizes, owcu_ptr *out, struct owcu_error *e);
// owcu_free frees n pieces that no work uses any more, and writes 0 over those
// that are gone. It goes on after an error and reports the first; of a lost
// device everything is gone.
int owcu_free(owcu_handle ctx, int64_t n, owcu_ptr *p, struct owcu_error *e);
// owcu_mark records an event on each of n streams, and makes those events that
// there are not. It says 1, and means nothing by them, while one of the streams
// is being captured.
int owcu_mark(owcu_handle ctx, int n, const uint64_t *streams, owcu_handle *events, struct owcu_error *e);
// owcu_passed says 1 when all work before the events is done, and 0 while it is
// not. It does not wait.
int owcu_passed(owcu_handle ctx, int n, const owcu_handle *events, struct owcu_error *e);
// owcu_register pins [p, p+n) for every context of the process.
int owcu_register(owcu_handle ctx, void *p, uint64_t n, struct owcu_error *e);
// owcu_unregister says 1 if the driver refused it and may not the next time.
int owcu_unregister(owcu_handle ctx, void *p, struct owcu_error *e);
int owcu_memory(owcu_handle ctx, uint64_t *unused, uint64_t *total, struct owcu_error *e);
// owcu_read copies on a stream of ours, which it makes the first time.
int owcu_read(owcu_handle ctx, owcu_handle *stream, void *dst, owcu_ptr src, uint64_t n, struct owcu_error *e);
int owcu_stream_end(owcu_handle ctx, owcu_handle *stream, struct owcu_error *e);

// owcu_module loads an image, of which it keeps a copy until it is closed, and
// looks up kernels by names, which are separated by NUL. After an error it may be
// opened again; m is zero the first time. Closing it says 1 as owcu_unregister does.
struct owcu_module {
	owcu_handle module;
	void *image;
};
int owcu_module_open(owcu_handle ctx, const void *image, uint64_t n, const char *names, int count, struct owcu_module *m,
                     owcu_handle *kernels, struct owcu_error *e);
int owcu_module_close(owcu_handle ctx, struct owcu_module *m, struct owcu_error *e);

// owcu_lane_new registers [pinned, pinned+bytes) and makes the streams, events
// and staging of a lane; NULL with nothing left behind on an error. Unregister
// goes with owcu_lane_free; the memory itself stays the caller's. Whoever uses
// the slots says how many, and where the status words of each are. If the driver
// refuses to take back what was made before an error, that is *left, for
// owcu_lane_free.
struct owcu_lane *owcu_lane_new(owcu_handle ctx, void *pinned, uint64_t bytes, int nslots, const owcu_handle *kernels,
                                struct owcu_lane **left, struct owcu_error *e);
// owcu_lane_free says 1 if the driver refused some of it: then it may be called
// again, for the rest. Anything else: the lane is gone, and so is its pinning.
int owcu_lane_free(struct owcu_lane *l, struct owcu_error *e);
int owcu_scratch(struct owcu_lane *l, uint64_t n, struct owcu_error *e);

// owcu_submit queues what stands in a slot. If it fails, nothing of the slot is
// still running when it returns.
int owcu_submit(struct owcu_lane *l, int slot, struct owcu_error *e);
// owcu_wait waits for the slot's last submit.
int owcu_wait(struct owcu_lane *l, int slot, struct owcu_error *e);
// owcu_join makes the lane go on after what is queued now on a stream of someone
// else.
int owcu_join(struct owcu_lane *l, uint64_t stream, struct owcu_error *e);

// owcu_event makes an event without times, or ends one that nothing needs any more
// (1: as owcu_unregister); owcu_event_before makes a stream go on after its last
// record.
int owcu_event(owcu_handle ctx, owcu_handle *event, struct owcu_error *e);
int owcu_event_before(owcu_handle ctx, owcu_handle event, uint64_t stream, struct owcu_error *e);

// owcu_floor copies the first n bytes of the slots to their staging, count
// times in turn, and waits: what the wire can do, with nothing else. The slots
// are the caller's.
int owcu_floor(struct owcu_lane *l, uint64_t stride, uint64_t head, uint64_t n, int count, struct owcu_error *e);

// owcu_across copies n bytes inside the staging, from its start to dst, count
// times, and waits: what the device's memory can do.
int owcu_across(struct owcu_lane *l, uint64_t dst, uint64_t n, int count, struct owcu_error *e);

// owcu_again launches the kernels of every slot's last submit again, count
// times, and waits: nothing is copied. The slots are the caller's, and what
// they decoded to is still there.
int owcu_again(struct owcu_lane *l, int count, struct owcu_error *e);

// owcu_timing switches the marks of the slots on, with the origin now, or off.
// Nothing is under way. Off, they cost a comparison.
int owcu_timing(struct owcu_lane *l, int on, struct owcu_error *e);

// owcu_list_new makes the head of a list of blocks that nobody holds any more;
// owcu_list_take empties it.
void **owcu_list_new(void);
void *owcu_list_take(void **list);

#endif
