//go:build cgo

#include "call.h"
#include "queue.h"

#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "../../../cuda/abi.h"

enum {
	NON_BLOCKING = 1,        // CU_STREAM_NON_BLOCKING
	BLOCKING_SYNC = 1,       // CU_EVENT_BLOCKING_SYNC: waiters sleep
	NO_TIMING = 2,           // CU_EVENT_DISABLE_TIMING
	PORTABLE_MAPPED = 1 | 2, // CU_MEMHOSTREGISTER_PORTABLE | DEVICEMAP
	ATTRIBUTE_SMS = 16,
	ATTRIBUTE_MAJOR = 75,
	ATTRIBUTE_MINOR = 76,
	ATTRIBUTE_COHERENT = 100, // CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
};

int owcu_enter(struct owcu_guard *g, owcu_handle ctx, struct owcu_error *e) { return enter(g, ctx, e); }

void owcu_leave(struct owcu_guard *g) { leave(g, 0); }

int owcu_begin(int *version, int *count, struct owcu_error *e)
{
	if (owcu_forked() ? failed(e, "fork", OWCU_FORKED) : TRY(init, (0))) // before that the driver has no modes
		return -1;
	return RELAXED(TRY(driver_version, (version)) || TRY(device_count, (count)));
}

int owcu_info_get(int ordinal, struct owcu_info *info, struct owcu_error *e)
{
	int d;
	size_t n = 0;
	int rc = RELAXED(TRY(device_get, (&d, ordinal)) || TRY(device_name, (info->name, sizeof info->name, d)) ||
	                 TRY(device_bus, (info->bus, sizeof info->bus, d)) || TRY(device_memory, (&n, d)) ||
	                 TRY(device_attribute, (&info->major, ATTRIBUTE_MAJOR, d)) ||
	                 TRY(device_attribute, (&info->minor, ATTRIBUTE_MINOR, d)) || TRY(device_attribute, (&info->sms, ATTRIBUTE_SMS, d)) ||
	                 TRY(device_attribute, (&info->coherent, ATTRIBUTE_COHERENT, d)));

	info->memory = n;
	return rc;
}

int owcu_ctx_open(int ordinal, int *device, owcu_handle *ctx, int *coherent, int *sms, struct owcu_error *e)
{
	return RELAXED(TRY(device_get, (device, ordinal)) || TRY(device_attribute, (coherent, ATTRIBUTE_COHERENT, *device)) ||
	               TRY(device_attribute, (sms, ATTRIBUTE_SMS, *device)) || TRY(ctx_retain, (ctx, *device)));
}

int owcu_ctx_close(int device, struct owcu_error *e)
{
	int mode;

	if (relax(&mode, e) && relax(&mode, e)) // a call that fails once may not fail again
		return -1;
	int rc = TRY(ctx_release, (device));
	harden(&mode);
	return rc;
}

int owcu_alloc(owcu_handle ctx, int64_t n, const uint64_t *sizes, owcu_ptr *out, struct owcu_error *e)
{
	struct owcu_guard g;
	int64_t i = 0;
	int rc = enter(&g, ctx, e);

	for (; rc == 0 && i < n; i++) {
		rc = TRY(mem_alloc, (&out[i], sizes[i]));
		if (rc)
			break;
	}
	for (int64_t k = rc ? 0 : n; k < n; k++)
		if (k >= i || owcu->mem_free(out[k]) == 0 || lost())
			out[k] = 0;
	return leave(&g, rc);
}

int owcu_free(owcu_handle ctx, int64_t n, owcu_ptr *p, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = retire(&g, ctx, e);

	if (rc)
		return rc;
	for (int64_t i = 0; i < n; i++) {
		int refused = TRY(mem_free, (p[i]));
		rc |= refused;
		if (!refused || lost())
			p[i] = 0;
	}
	return leave(&g, rc);
}

int owcu_mark(owcu_handle ctx, int n, const uint64_t *streams, owcu_handle *events, struct owcu_error *e)
{
	struct owcu_guard g;
	struct owcu_error not_now = {0};
	int rc = enter(&g, ctx, e), captured = 0;

	// Check before, so that nothing is recorded into a graph; and after, in case a
	// capture began in between: such an event must not be queried.
	for (int again = 0; rc == 0 && !captured && again < 2; again++) {
		for (int i = 0; rc == 0 && !captured && i < n; i++) {
			if (uncaptured(streams[i], &not_now)) {
				captured = not_now.code == OWCU_CAPTURED;
				rc = captured ? 0 : failed(e, not_now.call, not_now.code);
			} else if (!again) {
				rc = (events[i] == NULL && TRY(event_create, (&events[i], NO_TIMING))) ||
				     TRY(event_record, (events[i], handle(streams[i]))) ? -1 : 0;
			}
		}
	}
	return leave(&g, rc && !lost() ? rc : captured);
}

int owcu_passed(owcu_handle ctx, int n, const owcu_handle *events, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = enter(&g, ctx, e), passed = 1;

	for (int i = 0; rc == 0 && passed && i < n; i++) {
		int code = events[i] != NULL ? owcu->event_query(events[i]) : 0;
		passed = code != OWCU_NOT_READY;
		rc = passed ? failed(e, name_event_query, code) : 0;
	}
	return leave(&g, rc && !lost() ? rc : passed);
}

int owcu_register(owcu_handle ctx, void *p, uint64_t n, struct owcu_error *e)
{
	return WITHIN(ctx, TRY(host_register, (p, n, PORTABLE_MAPPED)));
}

int owcu_drop(owcu_handle ctx, int what, void *thing, struct owcu_error *e)
{
	struct owcu_guard g;
	owcu_ptr p = (owcu_ptr)(uintptr_t)thing;
	int rc = retire(&g, ctx, e), left = 0;

	if (rc)
		return rc;
	switch (what) {
	case OWCU_EVENT:
		DROP(thing, event_destroy);
		break;
	case OWCU_STREAM:
		DROP(thing, stream_destroy);
		break;
	case OWCU_PINNED:
		DROP(thing, host_unregister);
		break;
	case OWCU_ATTACHED:
		DROP(p, ipc_close);
		break;
	}
	return leave(&g, left);
}

int owcu_memory(owcu_handle ctx, uint64_t *unused, uint64_t *total, struct owcu_error *e)
{
	size_t a = 0, b = 0;
	int rc = WITHIN(ctx, TRY(mem_info, (&a, &b)));

	*unused = a;
	*total = b;
	return rc;
}

int owcu_read(owcu_handle ctx, owcu_handle *stream, void *dst, owcu_ptr src, uint64_t n, struct owcu_error *e)
{
	return WITHIN(ctx, (*stream == NULL && TRY(stream_create, (stream, NON_BLOCKING))) ||
	                           (TRY(copy_out_async, (dst, src, n, *stream)) | TRY(stream_sync, (*stream))));
}

int owcu_module_open(owcu_handle ctx, const void *image, uint64_t n, const char *names, int count, struct owcu_module *m,
                     owcu_handle *kernels, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = enter(&g, ctx, e);

	// The driver wants an aligned image and may read it again when a kernel is
	// first launched.
	if (rc == 0 && m->image == NULL) {
		if (posix_memalign(&m->image, 64, n)) {
			m->image = NULL;
			rc = failed(e, "posix_memalign", OWCU_OUT_OF_MEMORY);
		} else {
			memcpy(m->image, image, n);
		}
	}
	if (rc == 0 && m->module == NULL)
		rc = TRY(module_load, (&m->module, m->image));
	for (int i = 0; rc == 0 && i < count; i++, names += strlen(names) + 1)
		rc = TRY(module_function, (&kernels[i], m->module, names));
	return leave(&g, rc);
}

int owcu_module_close(owcu_handle ctx, struct owcu_module *m, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = retire(&g, ctx, e);

	if (rc)
		return rc;
	if (m->module != NULL && TRY(module_unload, (m->module))) {
		rc = lost() ? -1 : 1;
		if (rc > 0)
			return leave(&g, rc);
	}
	free(m->image);
	m->module = m->image = NULL;
	return leave(&g, rc);
}

// close_pad waits for the work on a pad's streams and frees what there is of it. It returns 1 if
// the driver refused some.
static int close_pad(struct owcu_pad *p, struct owcu_error *e)
{
	int left = 0;

	for (int i = 0; i < p->nstreams; i++)
		if (p->streams[i] && TRY(stream_sync, (p->streams[i])) && !lost())
			return 1;
	for (int i = 0; i < p->nevents; i++)
		DROP(p->events[i], event_destroy);
	for (int i = 0; i < p->nstreams; i++)
		DROP(p->streams[i], stream_destroy);
	DROP(p->device, mem_free);
	DROP(p->host, host_unregister);
	if (left)
		return 1;
	free(p->streams);
	*p = (struct owcu_pad){0};
	return 0;
}

// open_pad registers a pad's memory and makes its streams and events; close_pad frees what was made.
static int open_pad(struct owcu_pad *p, void *host, uint64_t n, uint64_t room, int nstreams, int nevents, int sleepers, struct owcu_error *e)
{
	p->streams = calloc((size_t)(nstreams + nevents), sizeof *p->streams);
	if (p->streams == NULL)
		return failed(e, "calloc", OWCU_OUT_OF_MEMORY);
	p->events = p->streams + nstreams;
	p->nstreams = nstreams;
	p->nevents = nevents;
	if (TRY(host_register, (host, n, PORTABLE_MAPPED)))
		return -1;
	p->host = host;
	if (TRY(host_pointer, (&p->mapped, host, 0)) || (room && TRY(mem_alloc, (&p->device, room))))
		return -1;
	for (int i = 0; i < nstreams; i++)
		if (TRY(stream_create, (&p->streams[i], NON_BLOCKING)))
			return -1;
	for (int i = 0; i < nevents; i++)
		if (TRY(event_create, (&p->events[i], NO_TIMING | (i < sleepers ? BLOCKING_SYNC : 0))))
			return -1;
	return 0;
}

int owcu_pad_new(owcu_handle ctx, struct owcu_pad *p, void *host, uint64_t n, uint64_t room, int nstreams, int nevents, int sleepers,
                 struct owcu_error *e)
{
	struct owcu_guard g;
	struct owcu_error ignored = {0};
	int rc = enter(&g, ctx, e);

	if (rc == 0 && (rc = open_pad(p, host, n, room, nstreams, nevents, sleepers, e)) && close_pad(p, &ignored))
		rc = 1;
	return leave(&g, rc);
}

int owcu_pad_free(owcu_handle ctx, struct owcu_pad *p, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = retire(&g, ctx, e);

	if (rc)
		return rc;
	rc = close_pad(p, e);
	return leave(&g, rc ? rc : e->call != NULL ? -1 : 0);
}

// close_queue frees the parts of a queue that were made, and returns 1 if the driver
// refused some of it.
static int close_queue(struct owcu_queue *q, struct owcu_error *e)
{
	int left = close_pad(&q->pad, e);

	if (left)
		return 1;
	for (int i = 0; i < 4 * q->made; i++)
		DROP(q->slots[i / 4]->marks[i % 4], event_destroy);
	DROP(q->origin, event_destroy);
	DROP(q->scratch, mem_free);
	if (left)
		return 1;
	for (int i = 0; i < q->made; i++)
		free(q->slots[i]);
	free(q->slots);
	free(q);
	return 0;
}

// open_queue makes a queue's pad and slots; close_queue frees what was made.
static int open_queue(struct owcu_queue *q, void *pinned, uint64_t bytes, int nslots, int staged, struct owcu_error *e)
{
	if (open_pad(&q->pad, pinned, bytes, staged ? bytes : 0, OWCU_STREAMS, 2 * nslots + 1, nslots, e))
		return -1;
	q->join = q->pad.events[2 * nslots];
	q->slots = calloc((size_t)nslots, sizeof *q->slots);
	for (; q->slots && q->made < nslots; q->made++) {
		struct owcu_slot *s = q->slots[q->made] = calloc(1, sizeof *s);
		if (s == NULL)
			break;
		s->done = q->pad.events[q->made];
		s->copied = q->pad.events[nslots + q->made];
	}
	return q->made < nslots ? failed(e, "calloc", OWCU_OUT_OF_MEMORY) : 0;
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
			rc = failed(e, "calloc", OWCU_OUT_OF_MEMORY);
	}
	if (rc == 0) {
		q->ctx = ctx;
		memcpy(q->kernels, kernels, sizeof q->kernels);
		rc = open_queue(q, pinned, bytes, nslots, staged, e);
	}
	if (rc && q) {
		if (close_queue(q, &ignored))
			*left = q;
		q = NULL;
	}
	leave(&g, rc);
	return q;
}

int owcu_queue_free(struct owcu_queue *q, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = retire(&g, q->ctx, e);

	if (rc)
		return rc;
	rc = close_queue(q, e);
	return leave(&g, rc ? rc : e->call != NULL ? -1 : 0);
}

int owcu_queue_more(struct owcu_queue *q, owcu_ptr *which, uint64_t n, struct owcu_error *e)
{
	return WITHIN(q->ctx, TRY(mem_alloc, (which, n)));
}

static int launch_all(struct owcu_queue *q, struct owcu_slot *s, owcu_handle stream, struct owcu_error *e)
{
	for (uint32_t i = 0; i < s->nlaunches; i++) {
		struct owcu_launch *k = &s->launches[i];
		void *args[] = {&k->a, &k->b, &k->n, &s->status};
		// The kernels of X16 come first and use the tables in shared memory.
		unsigned shared = k->kernel < OW_BYTES ? OW_X16_SHARED : 0;
		unsigned grid = (k->n + OW_X16_WARPS - 1) / OW_X16_WARPS;
		if (TRY(launch, (q->kernels[k->kernel], grid, 1, 1, 32 * OW_X16_WARPS, 1, 1, shared, stream, args, NULL)))
			return -1;
	}
	return 0;
}

// record_mark records one of a slot's events for the trace, if there is one.
static int record_mark(struct owcu_queue *q, struct owcu_slot *s, int k, owcu_handle stream, struct owcu_error *e)
{
	return q->timed ? TRY(event_record, (s->marks[k], stream)) : 0;
}

// submit_slot queues a slot's copies on the first stream, and its kernels on one of the others behind them.
static int submit_slot(struct owcu_queue *q, struct owcu_slot *s, struct owcu_error *e)
{
	owcu_handle copy = q->pad.streams[0], last = copy;

	if (s->then && s->nlaunches > 0)
		q->ordered = 1;
	if (s->nlaunches > 0 || (s->then && q->ordered))
		last = q->pad.streams[1 + s->stream];
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
	if (s->after && last != copy && TRY(stream_wait, (last, s->after, 0)))
		return -1;
	if (record_mark(q, s, 2, last, e) || launch_all(q, s, last, e) || record_mark(q, s, 3, last, e))
		return -1;
	if (s->then && TRY(event_record, (s->then, last)))
		return -1;
	return TRY(event_record, (s->done, last));
}

int owcu_submit(struct owcu_queue *q, int slot, struct owcu_error *e)
{
	struct owcu_guard g;
	struct owcu_slot *s = q->slots[slot];
	int rc = enter(&g, q->ctx, e);

	if (rc)
		return rc;
	rc = submit_slot(q, s, e);
	if (rc) {
		// Some of it may run, on memory that the caller is about to reuse.
		owcu->stream_sync(q->pad.streams[0]);
		owcu->stream_sync(q->pad.streams[1 + s->stream]);
	} else if (s->wait && (rc = TRY(event_sync, (s->done)))) {
		owcu->stream_sync(q->pad.streams[1 + s->stream]);
	}
	return leave(&g, rc);
}

// poll_event asks for an event again and again, and rests in between, since readers need the
// core, and others the driver: with rests of 10 microseconds two ranks loaded up to 5 % slower.
// What is wrong with the event is for others to find.
static void poll_event(owcu_handle event)
{
	const struct timespec rest = {.tv_nsec = 20000};

	prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0); // else a rest is 50 microseconds longer
	for (int i = 0; i < 50 && owcu->event_query(event) == OWCU_NOT_READY; i++)
		nanosleep(&rest, NULL);
	prctl(PR_SET_TIMERSLACK, 0, 0, 0, 0); // as it was
}

int owcu_wait(struct owcu_queue *q, int slot, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = enter(&g, q->ctx, e);

	// A driver that refuses once may answer the next time; without an answer
	// nothing is known about the memory.
	if (rc && enter(&g, q->ctx, e))
		return rc;
	if (rc == 0 && q->prompt)
		poll_event(q->slots[slot]->done);
	if (rc == 0)
		rc = TRY(event_sync, (q->slots[slot]->done));
	for (int k = 0; rc == 0 && q->timed && k < 4; k++)
		rc = TRY(event_elapsed, (&q->slots[slot]->at[k], q->origin, q->slots[slot]->marks[k]));
	// Whatever is wrong with the event, all work on the memory must have ended.
	for (int i = 0; rc && i < OWCU_STREAMS; i++)
		owcu->stream_sync(q->pad.streams[i]);
	return leave(&g, rc);
}

int owcu_join(struct owcu_queue *q, uint64_t stream, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = enter(&g, q->ctx, e);

	if (rc == 0)
		rc = uncaptured(stream, e) || TRY(event_record, (q->join, handle(stream))) ? -1 : 0;
	// A wait takes the event as it is now, so one event serves them all.
	for (int i = 0; rc == 0 && i < OWCU_STREAMS; i++)
		rc = TRY(stream_wait, (q->pad.streams[i], q->join, 0));
	return leave(&g, rc);
}

int owcu_event_new(owcu_handle ctx, owcu_handle *event, struct owcu_error *e)
{
	return WITHIN(ctx, TRY(event_create, (event, NO_TIMING)));
}

int owcu_event_before(owcu_handle ctx, owcu_handle event, uint64_t stream, struct owcu_error *e)
{
	return WITHIN(ctx, uncaptured(stream, e) || TRY(stream_wait, (handle(stream), event, 0)));
}

int owcu_again(struct owcu_queue *q, int count, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = enter(&g, q->ctx, e);

	if (rc)
		return rc;
	for (int i = 0; rc == 0 && i < count; i++)
		for (int k = 0; rc == 0 && k < q->nslots; k++)
			rc = launch_all(q, q->slots[k], q->pad.streams[1], e);
	rc |= TRY(stream_sync, (q->pad.streams[1]));
	return leave(&g, rc);
}

int owcu_timing(struct owcu_queue *q, int on, struct owcu_error *e)
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
			rc = TRY(event_record, (q->origin, q->pad.streams[0])) || TRY(stream_sync, (q->pad.streams[0])) ? -1 : 0;
		q->timed = rc == 0;
	}
	return leave(&g, rc);
}

void **owcu_list_new(void) { return calloc(1, sizeof(void *)); }

void *owcu_list_take(void **list) { return __atomic_exchange_n(list, NULL, __ATOMIC_ACQ_REL); }
