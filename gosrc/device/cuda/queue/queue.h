// Declares a queue of pinned slots. It combines driver calls into one cgo call and follows the rules of
// driver/context.h.
#ifndef OWCU_QUEUE_H
#define OWCU_QUEUE_H

#include "../driver/context.h"

// One stream of a queue copies, and the others compute. A piece is decoded by a few blocks, which takes longer than its
// copy, so several pieces are in flight.
enum { OWCU_STREAMS = 6 };

struct owcu_copy {
	owcu_ptr dst;
	const void *src;
	uint64_t n;
};

// owcu_launch is one kernel launch. Every kernel takes two tables, a number of items, and the status words. A block has
// eight warps, and each warp takes one item.
struct owcu_launch {
	uint32_t kernel, n;
	owcu_ptr a, b;
};

enum { OWCU_COPIES = 4096, OWCU_LAUNCHES = 128, OWCU_KERNELS = 11, OWCU_BEHIND = 8 };

// owcu_slot holds the next work of a slot. Go fills it while it owns the slot.
struct owcu_slot {
	owcu_handle copied, done; // events
	owcu_handle after; // event to wait for before writing, or 0
	uint64_t behind[OWCU_BEHIND]; // streams that must finish their queued work before the kernels run
	owcu_ptr status;
	// early is the number of copies that go directly to destinations. If wait is not 0, the call returns when the work
	// has ended. The kernels run on stream (1 + stream) % OWCU_STREAMS of the queue.
	uint32_t nbehind, ncopies, nlaunches, stream, early, wait;
	// marks are events before and after the copies and the launches, while times are traced. at holds their times in
	// milliseconds since the origin, set by owcu_wait_slot.
	owcu_handle marks[4];
	float at[4];
	struct owcu_copy copies[OWCU_COPIES];
	struct owcu_launch launches[OWCU_LAUNCHES];
};

struct owcu_queue {
	owcu_handle ctx;
	struct owcu_arena arena; // stream 0 copies; its device memory is the staging memory
	owcu_handle kernels[OWCU_KERNELS];
	owcu_handle join; // event for FollowStream
	owcu_ptr scratch;
	struct owcu_slot **slots;
	int nallocated, nslots; // allocated slots, and slots in use
	owcu_handle origin; // event relative to which the slots' marks are measured
	int timed;
};

// owcu_queue_new registers [pinned, pinned+bytes) and makes the streams and events of a queue and, if `staged`, its
// staging memory. After an error it returns NULL and frees everything. If the driver fails to free a part, *left is set
// to a queue that the caller must pass to owcu_queue_free, which unregisters the memory. The caller still owns the
// memory. It sets the number of slots and the address of each slot's status words.
struct owcu_queue *owcu_queue_new(owcu_handle ctx, void *pinned, uint64_t bytes, int nslots, int staged,
                                const owcu_handle *kernels, struct owcu_queue **left, struct owcu_error *e);
// owcu_queue_free returns 1 if the driver failed to free some of it. It may then be called again for the rest.
// Otherwise the queue has been freed and its memory unregistered.
int owcu_queue_free(struct owcu_queue *q, struct owcu_error *e);
// owcu_queue_alloc allocates a queue's scratch or staging memory, which is freed with the queue.
int owcu_queue_alloc(struct owcu_queue *q, owcu_ptr *which, uint64_t n, struct owcu_error *e);

// owcu_submit_slot queues the work of a slot. If it fails, none of that work is still running when it returns.
int owcu_submit_slot(struct owcu_queue *q, int slot, struct owcu_error *e);
// owcu_wait_slot waits until the slot's last submission has ended. This holds even if the function returns an error,
// unless the driver denied access to the context for five seconds.
int owcu_wait_slot(struct owcu_queue *q, int slot, struct owcu_error *e);
// owcu_has_slot_ended reports, without waiting, whether owcu_wait_slot would return immediately, even with an error.
int owcu_has_slot_ended(struct owcu_queue *q, int slot);
// owcu_load_kernels launches the kernels that most loads need, without work.
int owcu_load_kernels(struct owcu_queue *q, struct owcu_error *e);
// owcu_pause spins for about 50 nanoseconds per round, and lets the other hardware thread of the core run.
void owcu_pause(int rounds);
// owcu_queue_follow makes the queue wait for the work that is now queued on a caller's stream.
int owcu_queue_follow(struct owcu_queue *q, uint64_t stream, struct owcu_error *e);

// owcu_time_slots turns the marks of the slots on, with the origin now, or off. No work may be in flight. When off,
// they cost only a comparison.
int owcu_time_slots(struct owcu_queue *q, int on, struct owcu_error *e);

// owcu_block_list_new makes the head of a list of blocks without a holder. owcu_block_list_take_all empties the list.
void **owcu_block_list_new(void);
void *owcu_block_list_take_all(void **list);

#endif
