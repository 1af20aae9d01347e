// Implements a queue of pinned slots, and submits slots.
#include "queue.h"

#include <stdlib.h>
#include <string.h>

#include "../../../../cuda/abi.h"
#include "../driver/call.h"

// free_queue_parts frees the parts of a queue that exist. It returns 1 if the driver failed to free some of them.
static int free_queue_parts(struct owcu_queue *q, struct owcu_error *e)
{
	int left = owcu_arena_free_entered(&q->arena, e);

	if (left)
		return 1;
	for (int i = 0; i < 4 * q->nallocated; i++)
		DROP(q->slots[i / 4]->marks[i % 4], event_destroy);
	DROP(q->origin, event_destroy);
	DROP(q->scratch, mem_free);
	if (left)
		return 1;
	for (int i = 0; i < q->nallocated; i++)
		free(q->slots[i]);
	free(q->slots);
	free(q);
	return 0;
}

// make_queue_parts makes a queue's arena and slots. After an error, free_queue_parts frees what was made.
static int make_queue_parts(struct owcu_queue *q, void *pinned, uint64_t bytes, int nslots, int staged,
                            struct owcu_error *e)
{
	if (owcu_arena_fill_entered(&q->arena, pinned, bytes, staged ? bytes : 0, OWCU_STREAMS, 2 * nslots + 1, nslots, e))
		return -1;
	q->join = q->arena.events[2 * nslots];
	q->slots = calloc((size_t)nslots, sizeof *q->slots);
	for (; q->slots && q->nallocated < nslots; q->nallocated++) {
		struct owcu_slot *s = q->slots[q->nallocated] = calloc(1, sizeof *s);
		if (s == NULL)
			break;
		s->done = q->arena.events[q->nallocated];
		s->copied = q->arena.events[nslots + q->nallocated];
	}
	return q->nallocated < nslots ? record_error(e, "calloc", OWCU_OUT_OF_MEMORY) : 0;
}

struct owcu_queue *owcu_queue_new(owcu_handle ctx, void *pinned, uint64_t bytes, int nslots, int staged,
                                const owcu_handle *kernels, struct owcu_queue **left, struct owcu_error *e)
{
	struct owcu_guard g;
	struct owcu_error ignored = {0};
	struct owcu_queue *q = NULL;
	int rc = enter(&g, ctx, e);

	if (rc == 0) {
		q = calloc(1, sizeof *q);
		if (q == NULL)
			rc = record_error(e, "calloc", OWCU_OUT_OF_MEMORY);
	}
	if (rc == 0) {
		q->ctx = ctx;
		memcpy(q->kernels, kernels, sizeof q->kernels);
		rc = make_queue_parts(q, pinned, bytes, nslots, staged, e);
	}
	if (rc && q) {
		if (free_queue_parts(q, &ignored))
			*left = q;
		q = NULL;
	}
	leave(&g, rc);
	return q;
}

int owcu_queue_free(struct owcu_queue *q, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = enter_to_free(&g, q->ctx, e);

	if (rc)
		return rc;
	rc = free_queue_parts(q, e);
	return leave(&g, rc ? rc : e->call != NULL ? -1 : 0);
}

int owcu_queue_alloc(struct owcu_queue *q, owcu_ptr *which, uint64_t n, struct owcu_error *e)
{
	return WITHIN(q->ctx, TRY(mem_alloc, (which, n)));
}

static int launch_kernels(struct owcu_queue *q, struct owcu_slot *s, owcu_handle stream, struct owcu_error *e)
{
	for (uint32_t i = 0; i < s->nlaunches; i++) {
		struct owcu_launch *k = &s->launches[i];
		void *args[] = {&k->a, &k->b, &k->n, &s->status};
		// The X16 kernels come first. They hold their tables in shared memory.
		unsigned shared = k->kernel < OW_BYTES ? OW_X16_SHARED : 0;
		unsigned grid = (k->n + OW_X16_WARPS - 1) / OW_X16_WARPS;
		if (TRY(launch, (q->kernels[k->kernel], grid, 1, 1, 32 * OW_X16_WARPS, 1, 1, shared, stream, args, NULL)))
			return -1;
	}
	return 0;
}

int owcu_load_kernels(struct owcu_queue *q, struct owcu_error *e)
{
	static const int common[] = {0, 8, 10}; // indices in kernelNames: bf16, moves, checksums
	struct owcu_guard g;
	int rc = enter(&g, q->ctx, e);

	for (int i = 0; rc == 0 && i < 3; i++) {
		uint64_t nothing = 0;
		uint32_t n = 0;
		void *args[] = {&nothing, &nothing, &n, &nothing};
		unsigned shared = common[i] < OW_BYTES ? OW_X16_SHARED : 0;
		rc = TRY(launch, (q->kernels[common[i]], 1, 1, 1, 32 * OW_X16_WARPS, 1, 1, shared, q->arena.streams[1 + i], args, NULL));
	}
	return leave(&g, rc);
}

// record_mark records one of a slot's events if times are traced.
static int record_mark(struct owcu_queue *q, struct owcu_slot *s, int k, owcu_handle stream, struct owcu_error *e)
{
	return q->timed ? TRY(event_record, (s->marks[k], stream)) : 0;
}

// follow_stream makes a stream of the queue wait for the work that is now queued on another stream. A wait refers to
// the current record of the event, so all waits can use one event.
static int follow_stream(struct owcu_queue *q, owcu_handle stream, uint64_t other, struct owcu_error *e)
{
	return refuse_captured(other, e) || TRY(event_record, (q->join, stream_handle(other))) ||
	       TRY(stream_wait, (stream, q->join, 0)) ? -1 : 0;
}

// submit_slot queues a slot's copies on the first stream, and then its kernels on one of the other streams.
static int submit_slot(struct owcu_queue *q, struct owcu_slot *s, struct owcu_error *e)
{
	owcu_handle copy = q->arena.streams[0], last = copy;

	if (s->nlaunches > 0)
		last = q->arena.streams[(1 + s->stream) % OWCU_STREAMS];
	if (s->ncopies == 0)
		copy = last;
	if (s->after && (s->early || last == copy) && TRY(stream_wait, (copy, s->after, 0)))
		return -1;
	if (record_mark(q, s, 0, copy, e))
		return -1;
	for (uint32_t i = 0; i < s->ncopies; i++)
		if (TRY(copy_in, (s->copies[i].dst, s->copies[i].src, s->copies[i].n, copy)))
			return -1;
	if (record_mark(q, s, 1, copy, e))
		return -1;
	if (last != copy && (TRY(event_record, (s->copied, copy)) || TRY(stream_wait, (last, s->copied, 0))))
		return -1;
	for (uint32_t i = 0; i < s->nbehind; i++)
		if (follow_stream(q, last, s->behind[i], e))
			return -1;
	if (s->after && last != copy && !s->early && TRY(stream_wait, (last, s->after, 0)))
		return -1;
	if (record_mark(q, s, 2, last, e) || launch_kernels(q, s, last, e) || record_mark(q, s, 3, last, e))
		return -1;
	return TRY(event_record, (s->done, last));
}

int owcu_submit_slot(struct owcu_queue *q, int slot, struct owcu_error *e)
{
	struct owcu_guard g;
	struct owcu_slot *s = q->slots[slot];
	int rc = enter(&g, q->ctx, e);

	if (rc)
		return rc;
	rc = submit_slot(q, s, e);
	if (rc) {
		// Some of the work may still be using memory that the caller is about to reuse.
		owcu->stream_sync(q->arena.streams[0]);
		owcu->stream_sync(q->arena.streams[(1 + s->stream) % OWCU_STREAMS]);
	} else if (s->wait && (rc = TRY(event_sync, (s->done)))) {
		owcu->stream_sync(q->arena.streams[(1 + s->stream) % OWCU_STREAMS]);
	}
	return leave(&g, rc);
}

int owcu_has_slot_ended(struct owcu_queue *q, int slot)
{
	struct owcu_guard g;
	struct owcu_error ignored = {0};

	if (enter(&g, q->ctx, &ignored))
		return 1;
	return leave(&g, owcu->event_query(q->slots[slot]->done) != OWCU_NOT_READY);
}

void owcu_pause(int rounds)
{
	for (int i = 0; i < rounds; i++)
#if defined(__x86_64__)
		__builtin_ia32_pause();
#else
		__asm__ volatile("yield");
#endif
}

int owcu_wait_slot(struct owcu_queue *q, int slot, struct owcu_error *e)
{
	struct owcu_guard g;
	int out, rc = enter_to_wait(&g, q->ctx, WAIT_TRIES, &out, e);

	if (out)
		return out;
	if (rc == 0)
		rc = TRY(event_sync, (q->slots[slot]->done));
	for (int k = 0; rc == 0 && q->timed && k < 4; k++)
		rc = TRY(event_elapsed, (&q->slots[slot]->at[k], q->origin, q->slots[slot]->marks[k]));
	// After any error, all work on the memory must still have ended.
	for (int i = 0; rc && i < OWCU_STREAMS; i++)
		owcu->stream_sync(q->arena.streams[i]);
	return leave(&g, rc);
}

int owcu_queue_follow(struct owcu_queue *q, uint64_t stream, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = enter(&g, q->ctx, e);

	if (rc == 0)
		rc = refuse_captured(stream, e) || TRY(event_record, (q->join, stream_handle(stream))) ? -1 : 0;
	// A wait refers to the current record of the event, so all waits can use one event.
	for (int i = 0; rc == 0 && i < OWCU_STREAMS; i++)
		rc = TRY(stream_wait, (q->arena.streams[i], q->join, 0));
	return leave(&g, rc);
}

int owcu_time_slots(struct owcu_queue *q, int on, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = enter(&g, q->ctx, e);

	q->timed = 0;
	if (rc == 0 && on) {
		if (q->origin == NULL)
			rc = TRY(event_create, (&q->origin, 0));
		for (int i = 0; rc == 0 && i < 4 * q->nslots; i++)
			if (q->slots[i / 4]->marks[i % 4] == NULL)
				rc = TRY(event_create, (&q->slots[i / 4]->marks[i % 4], 0));
		if (rc == 0)
			rc = TRY(event_record, (q->origin, q->arena.streams[0])) || TRY(stream_sync, (q->arena.streams[0])) ? -1 : 0;
		q->timed = rc == 0;
	}
	return leave(&g, rc);
}

void **owcu_block_list_new(void) { return calloc(1, sizeof(void *)); }

void *owcu_block_list_take_all(void **list) { return __atomic_exchange_n(list, NULL, __ATOMIC_ACQ_REL); }
