// Declares a queue of pinned slots. It bundles several driver calls into one cgo call, by the rules of
// driver/context.h.
#ifndef OWCU_QUEUE_H
#define OWCU_QUEUE_H

#include "../driver/context.h"

// Streams of a queue: one copies, the others compute. A piece decodes in a few blocks and takes longer than its
// copy, so several pieces are in flight.
enum { OWCU_STREAMS = 6 };

struct owcu_copy {
	owcu_ptr dst;
	const void *src;
	uint64_t n;
};

// One launch of a kernel. All kernels take two tables, a number of items and the status words. A block has eight
// warps, and a warp takes one item.
struct owcu_launch {
	uint32_t kernel, n;
	owcu_ptr a, b;
};

enum { OWCU_COPIES = 4096, OWCU_LAUNCHES = 128, OWCU_KERNELS = 11, OWCU_BEHIND = 8 };

// The next work of a slot. Go fills it while it owns the slot.
struct owcu_slot {
	owcu_handle copied, done; // events
	owcu_handle after; // the caller's, or 0: wait for it before writing
	uint64_t behind[OWCU_BEHIND]; // streams: wait for what is queued there now
	owcu_ptr status;
	// early: how many of the copies go to destinations. wait: return when all is done. stream: the kernels' stream,
	// counted after the first; the last number is the first stream itself.
	uint32_t nbehind, ncopies, nlaunches, stream, early, wait;
	// While the queue is timed: events before and after the copies and the launches, and their times in
	// milliseconds since the origin, set when they were waited for.
	owcu_handle marks[4];
	float at[4];
	struct owcu_copy copies[OWCU_COPIES];
	struct owcu_launch launches[OWCU_LAUNCHES];
};

struct owcu_queue {
	owcu_handle ctx;
	struct owcu_arena arena; // stream 0 copies; the device's memory is the staging
	owcu_handle kernels[OWCU_KERNELS];
	owcu_handle join; // event for FollowStream
	owcu_ptr scratch;
	struct owcu_slot **slots;
	int nallocated, nslots; // slots in memory, and those in use
	owcu_handle origin; // event from which the slots' marks are measured
	int timed;
};

// owcu_queue_new registers [pinned, pinned+bytes) and makes the streams and events of a queue and, if `staged`,
// its staging. On an error it returns NULL and nothing remains. owcu_queue_free unregisters; the caller keeps the
// memory itself. The user of the slots sets their number and the address of each slot's status words. If an error
// occurred and the driver refuses to free what was made before it, *left holds that, for owcu_queue_free.
struct owcu_queue *owcu_queue_new(owcu_handle ctx, void *pinned, uint64_t bytes, int nslots, int staged,
                                const owcu_handle *kernels, struct owcu_queue **left, struct owcu_error *e);
// owcu_queue_free returns 1 if the driver refused to free some of it. It may then be called again for the rest.
// Otherwise the queue and its registration are gone.
int owcu_queue_free(struct owcu_queue *q, struct owcu_error *e);
// owcu_queue_alloc allocates a queue's scratch or staging, which are freed with the queue.
int owcu_queue_alloc(struct owcu_queue *q, owcu_ptr *which, uint64_t n, struct owcu_error *e);

// owcu_submit_slot queues the work of a slot. If it fails, none of that work is still running when it returns.
int owcu_submit_slot(struct owcu_queue *q, int slot, struct owcu_error *e);
// owcu_wait_slot waits for the slot's last submit. That has ended whatever the function returns, unless the
// driver refused access to the context for five seconds.
int owcu_wait_slot(struct owcu_queue *q, int slot, struct owcu_error *e);
// owcu_has_slot_ended reports, without waiting, whether owcu_wait_slot would return at once, even if with an
// error.
int owcu_has_slot_ended(struct owcu_queue *q, int slot);
// owcu_load_kernels launches the kernels that most loads need, with no work.
int owcu_load_kernels(struct owcu_queue *q, struct owcu_error *e);
// owcu_pause keeps the core but lets its other hardware thread run, for some 50 nanoseconds per round.
void owcu_pause(int rounds);
// owcu_queue_follow makes the queue wait for what is queued now on a caller's stream.
int owcu_queue_follow(struct owcu_queue *q, uint64_t stream, struct owcu_error *e);

// owcu_time_slots turns the marks of the slots on, with the origin now, or off. No work may be in flight. When
// off, they cost one comparison.
int owcu_time_slots(struct owcu_queue *q, int on, struct owcu_error *e);

// owcu_block_list_new makes the head of a list of blocks without a holder; owcu_block_list_take_all
// empties it.
void **owcu_block_list_new(void);
void *owcu_block_list_take_all(void **list);

#endif
