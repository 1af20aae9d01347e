//go:build cgo

#include "call.h"
#include "lane.h"

#include <stdlib.h>
#include <string.h>

#include "../../../cuda/abi.h"

enum {
	NON_BLOCKING = 1,        // CU_STREAM_NON_BLOCKING
	BLOCKING_SYNC = 1,       // CU_EVENT_BLOCKING_SYNC: waiters sleep
	NO_TIMING = 2,           // CU_EVENT_DISABLE_TIMING
	PORTABLE_MAPPED = 1 | 2, // CU_MEMHOSTREGISTER_PORTABLE | DEVICEMAP
	ATTRIBUTE_SMS = 16,
	ATTRIBUTE_MAJOR = 75,
	ATTRIBUTE_MINOR = 76,
};

int owcu_enter(owcu_handle ctx, owcu_handle *before, struct owcu_error *e)
{
	struct guard g;
	int rc = enter(&g, ctx, e);

	*before = g.before;
	return rc;
}

void owcu_leave(owcu_handle ctx, owcu_handle before)
{
	struct guard g = {before, ctx};

	leave(&g, 0);
}

int owcu_begin(int *version, int *count, struct owcu_error *e)
{
	if (owcu_forked())
		return failed(e, "fork", OWCU_FORKED);
	if (TRY(init, (0)) || TRY(driver_version, (version)) || TRY(device_count, (count)))
		return -1;
	return 0;
}

int owcu_info_get(int ordinal, struct owcu_info *info, struct owcu_error *e)
{
	int d;
	size_t n = 0;

	if (owcu_forked())
		return failed(e, "fork", OWCU_FORKED);
	if (TRY(device_get, (&d, ordinal)) || TRY(device_name, (info->name, sizeof info->name, d)) ||
	    TRY(device_bus, (info->bus, sizeof info->bus, d)) || TRY(device_memory, (&n, d)) ||
	    TRY(device_attribute, (&info->major, ATTRIBUTE_MAJOR, d)) ||
	    TRY(device_attribute, (&info->minor, ATTRIBUTE_MINOR, d)) || TRY(device_attribute, (&info->sms, ATTRIBUTE_SMS, d)))
		return -1;
	info->memory = n;
	return 0;
}

int owcu_ctx_open(int ordinal, int *device, owcu_handle *ctx, struct owcu_error *e)
{
	if (owcu_forked())
		return failed(e, "fork", OWCU_FORKED);
	return TRY(device_get, (device, ordinal)) || TRY(ctx_retain, (ctx, *device)) ? -1 : 0;
}

int owcu_ctx_close(int device, struct owcu_error *e)
{
	if (owcu_forked())
		return failed(e, "fork", OWCU_FORKED);
	return TRY(ctx_release, (device));
}

int owcu_alloc(owcu_handle ctx, int64_t n, const uint64_t *sizes, owcu_ptr *out, struct owcu_error *e)
{
	struct guard g;
	int64_t i = 0;
	int rc = enter(&g, ctx, e);

	for (; rc == 0 && i < n; i++) {
		rc = TRY(mem_alloc, (&out[i], sizes[i]));
		if (rc)
			break;
	}
	if (rc)
		while (i-- > 0)
			owcu->mem_free(out[i]);
	return leave(&g, rc);
}

int owcu_free(owcu_handle ctx, int64_t n, const owcu_ptr *p, struct owcu_error *e)
{
	struct guard g;
	int rc = enter(&g, ctx, e);

	if (owcu_forked())
		return rc;
	// Work on the memory may still be queued on a stream that we never saw.
	rc |= TRY(ctx_sync, ());
	for (int64_t i = 0; i < n; i++)
		rc |= TRY(mem_free, (p[i]));
	return leave(&g, rc);
}

int owcu_register(owcu_handle ctx, void *p, uint64_t n, struct owcu_error *e)
{
	struct guard g;
	int rc = enter(&g, ctx, e);

	if (rc == 0)
		rc = TRY(host_register, (p, n, PORTABLE_MAPPED));
	return leave(&g, rc);
}

int owcu_unregister(owcu_handle ctx, void *p, struct owcu_error *e)
{
	struct guard g;
	int rc = enter(&g, ctx, e);

	if (owcu_forked())
		return rc;
	rc |= TRY(host_unregister, (p));
	return leave(&g, rc);
}

int owcu_memory(owcu_handle ctx, uint64_t *unused, uint64_t *total, struct owcu_error *e)
{
	struct guard g;
	size_t a = 0, b = 0;
	int rc = enter(&g, ctx, e);

	if (rc == 0)
		rc = TRY(mem_info, (&a, &b));
	*unused = a;
	*total = b;
	return leave(&g, rc);
}

int owcu_read(owcu_handle ctx, void *dst, owcu_ptr src, uint64_t n, struct owcu_error *e)
{
	struct guard g;
	int rc = enter(&g, ctx, e);

	if (rc == 0)
		rc = TRY(copy_out, (dst, src, n));
	return leave(&g, rc);
}

int owcu_module_open(owcu_handle ctx, const void *image, uint64_t n, const char *names, int count, struct owcu_module *m,
                     owcu_handle *kernels, struct owcu_error *e)
{
	struct guard g;
	int rc = enter(&g, ctx, e);

	m->module = m->image = NULL;
	// The driver wants an aligned image and may look at it again when a kernel
	// is first launched.
	if (rc == 0 && posix_memalign(&m->image, 64, n))
		rc = failed(e, "posix_memalign", OWCU_OUT_OF_MEMORY);
	if (rc == 0) {
		memcpy(m->image, image, n);
		rc = TRY(module_load, (&m->module, m->image));
	}
	for (int i = 0; rc == 0 && i < count; i++, names += strlen(names) + 1)
		rc = TRY(module_function, (&kernels[i], m->module, names));
	if (rc) {
		if (m->module != NULL)
			owcu->module_unload(m->module);
		free(m->image);
		m->module = m->image = NULL;
	}
	return leave(&g, rc);
}

int owcu_module_close(owcu_handle ctx, struct owcu_module *m, struct owcu_error *e)
{
	struct guard g;
	int rc = enter(&g, ctx, e);

	if (owcu_forked() || m->module == NULL)
		return leave(&g, rc);
	rc |= TRY(module_unload, (m->module));
	free(m->image);
	m->module = m->image = NULL;
	return leave(&g, rc);
}

// unmake undoes whatever part of a lane was made.
static int unmake(struct owcu_lane *l, struct owcu_error *e)
{
	int rc = 0;

	for (int i = 0; i < OWCU_STREAMS; i++)
		if (l->streams[i])
			rc |= TRY(stream_sync, (l->streams[i]));
	for (int i = 0; l->slots && i < l->made; i++) {
		struct owcu_slot *s = l->slots[i];
		if (s && s->copied)
			rc |= TRY(event_destroy, (s->copied));
		if (s && s->done)
			rc |= TRY(event_destroy, (s->done));
		for (int k = 0; s && k < 4; k++)
			if (s->marks[k])
				rc |= TRY(event_destroy, (s->marks[k]));
		free(s);
	}
	free(l->slots);
	if (l->join)
		rc |= TRY(event_destroy, (l->join));
	if (l->origin)
		rc |= TRY(event_destroy, (l->origin));
	for (int i = 0; i < OWCU_STREAMS; i++)
		if (l->streams[i])
			rc |= TRY(stream_destroy, (l->streams[i]));
	if (l->scratch)
		rc |= TRY(mem_free, (l->scratch));
	if (l->staging)
		rc |= TRY(mem_free, (l->staging));
	if (l->pinned)
		rc |= TRY(host_unregister, (l->pinned));
	free(l);
	return rc;
}

static int make(struct owcu_lane *l, void *pinned, uint64_t bytes, int nslots, struct owcu_error *e)
{
	const unsigned quiet = BLOCKING_SYNC | NO_TIMING;

	if (TRY(host_register, (pinned, bytes, PORTABLE_MAPPED)))
		return -1;
	l->pinned = pinned;
	if (TRY(host_pointer, (&l->mapped, pinned, 0)) || TRY(mem_alloc, (&l->staging, bytes)))
		return -1;
	for (int i = 0; i < OWCU_STREAMS; i++)
		if (TRY(stream_create, (&l->streams[i], NON_BLOCKING)))
			return -1;
	if (TRY(event_create, (&l->join, NO_TIMING)))
		return -1;
	l->slots = calloc((size_t)nslots, sizeof *l->slots);
	if (l->slots == NULL)
		return failed(e, "calloc", OWCU_OUT_OF_MEMORY);
	l->made = nslots;
	for (int i = 0; i < nslots; i++) {
		struct owcu_slot *s = l->slots[i] = calloc(1, sizeof *s);
		if (s == NULL)
			return failed(e, "calloc", OWCU_OUT_OF_MEMORY);
		if (TRY(event_create, (&s->copied, NO_TIMING)) || TRY(event_create, (&s->done, quiet)))
			return -1;
	}
	return 0;
}

struct owcu_lane *owcu_lane_new(owcu_handle ctx, void *pinned, uint64_t bytes, int nslots, const owcu_handle *kernels,
                                struct owcu_error *e)
{
	struct guard g;
	struct owcu_error ignored = {0};
	struct owcu_lane *l = NULL;
	int rc = enter(&g, ctx, e);

	if (rc == 0) {
		l = calloc(1, sizeof *l);
		if (l == NULL)
			rc = failed(e, "calloc", OWCU_OUT_OF_MEMORY);
	}
	if (rc == 0) {
		l->ctx = ctx;
		memcpy(l->kernels, kernels, sizeof l->kernels);
		rc = make(l, pinned, bytes, nslots, e);
	}
	if (rc && l) {
		unmake(l, &ignored);
		l = NULL;
	}
	leave(&g, rc);
	return l;
}

int owcu_lane_free(struct owcu_lane *l, struct owcu_error *e)
{
	struct guard g;
	int rc = enter(&g, l->ctx, e);

	if (owcu_forked())
		return rc;
	rc |= unmake(l, e);
	return leave(&g, rc);
}

int owcu_scratch(struct owcu_lane *l, uint64_t n, struct owcu_error *e)
{
	struct guard g;
	int rc = enter(&g, l->ctx, e);

	if (rc == 0)
		rc = TRY(mem_alloc, (&l->scratch, n));
	return leave(&g, rc);
}

static int launch_all(struct owcu_lane *l, struct owcu_slot *s, owcu_handle stream, struct owcu_error *e)
{
	for (uint32_t i = 0; i < s->nlaunches; i++) {
		struct owcu_launch *k = &s->launches[i];
		void *args[] = {&k->a, &k->b, &k->n, &s->status};
		// The kernels of X16 come first and use the tables in shared memory.
		unsigned shared = k->kernel < OW_BYTES ? OW_X16_SHARED : 0;
		unsigned grid = (k->n + OW_X16_WARPS - 1) / OW_X16_WARPS;
		if (TRY(launch, (l->kernels[k->kernel], grid, 1, 1, 32 * OW_X16_WARPS, 1, 1, shared, stream, args, NULL)))
			return -1;
	}
	return 0;
}

// mark records one of a slot's events for the trace, if there is one.
static int mark(struct owcu_lane *l, struct owcu_slot *s, int k, owcu_handle stream, struct owcu_error *e)
{
	return l->timed ? TRY(event_record, (s->marks[k], stream)) : 0;
}

static int queue(struct owcu_lane *l, struct owcu_slot *s, struct owcu_error *e)
{
	owcu_handle copy = l->streams[0], last = copy;

	if (s->after && s->early && TRY(stream_wait, (copy, s->after, 0)))
		return -1;
	if (mark(l, s, 0, copy, e))
		return -1;
	for (uint32_t i = 0; i < s->ncopies; i++)
		if (TRY(copy_in, (s->copies[i].dst, s->copies[i].src, s->copies[i].n, copy)))
			return -1;
	if (mark(l, s, 1, copy, e))
		return -1;
	if (s->nlaunches > 0 || s->then) {
		last = l->streams[1 + s->stream];
		if (TRY(event_record, (s->copied, copy)) || TRY(stream_wait, (last, s->copied, 0)))
			return -1;
	}
	if (s->after && last != copy && TRY(stream_wait, (last, s->after, 0)))
		return -1;
	if (mark(l, s, 2, last, e) || launch_all(l, s, last, e) || mark(l, s, 3, last, e))
		return -1;
	if (s->then && TRY(event_record, (s->then, last)))
		return -1;
	return TRY(event_record, (s->done, last));
}

int owcu_submit(struct owcu_lane *l, int slot, struct owcu_error *e)
{
	struct guard g;
	struct owcu_slot *s = l->slots[slot];
	int rc = enter(&g, l->ctx, e);

	if (rc == 0)
		rc = queue(l, s, e);
	if (rc && !owcu_forked()) {
		// Half of it may run, on memory that the caller is about to reuse.
		owcu->stream_sync(l->streams[0]);
		owcu->stream_sync(l->streams[1 + s->stream]);
	} else if (rc == 0 && s->wait) {
		rc = TRY(event_sync, (s->done));
	}
	return leave(&g, rc);
}

int owcu_wait(struct owcu_lane *l, int slot, struct owcu_error *e)
{
	struct guard g;
	int rc = enter(&g, l->ctx, e);

	if (rc == 0)
		rc = TRY(event_sync, (l->slots[slot]->done));
	for (int k = 0; rc == 0 && l->timed && k < 4; k++)
		rc = TRY(event_elapsed, (&l->slots[slot]->at[k], l->origin, l->slots[slot]->marks[k]));
	if (rc && !owcu_forked())
		owcu->ctx_sync(); // whatever the event's fault, the memory must be at rest
	return leave(&g, rc);
}

int owcu_join(struct owcu_lane *l, uint64_t stream, struct owcu_error *e)
{
	struct guard g;
	int rc = enter(&g, l->ctx, e);

	if (rc == 0)
		rc = TRY(event_record, (l->join, (owcu_handle)(uintptr_t)stream));
	// A wait takes the event as it is now, so one event serves them all.
	for (int i = 0; rc == 0 && i < OWCU_STREAMS; i++)
		rc = TRY(stream_wait, (l->streams[i], l->join, 0));
	return leave(&g, rc);
}

int owcu_event(owcu_handle ctx, owcu_handle *event, struct owcu_error *e)
{
	struct guard g;
	int rc = enter(&g, ctx, e);

	if (*event != NULL)
		rc |= owcu_forked() ? 0 : TRY(event_destroy, (*event));
	else if (rc == 0)
		rc = TRY(event_create, (event, NO_TIMING));
	return leave(&g, rc);
}

int owcu_event_before(owcu_handle ctx, owcu_handle event, uint64_t stream, struct owcu_error *e)
{
	struct guard g;
	int rc = enter(&g, ctx, e);

	if (rc == 0)
		rc = TRY(stream_wait, ((owcu_handle)(uintptr_t)stream, event, 0));
	return leave(&g, rc);
}

int owcu_floor(struct owcu_lane *l, uint64_t stride, uint64_t head, uint64_t n, int count, struct owcu_error *e)
{
	struct guard g;
	int rc = enter(&g, l->ctx, e);

	for (int i = 0; rc == 0 && i < count; i++) {
		uint64_t at = (uint64_t)(i % l->nslots) * stride + head;
		rc = TRY(copy_in, (l->staging + at, (char *)l->pinned + at, n, l->streams[0]));
	}
	if (!owcu_forked())
		rc |= TRY(stream_sync, (l->streams[0]));
	return leave(&g, rc);
}

int owcu_across(struct owcu_lane *l, uint64_t dst, uint64_t n, int count, struct owcu_error *e)
{
	struct guard g;
	int rc = enter(&g, l->ctx, e);

	for (int i = 0; rc == 0 && i < count; i++)
		rc = TRY(copy_across, (l->staging + dst, l->staging, n, l->streams[0]));
	if (!owcu_forked())
		rc |= TRY(stream_sync, (l->streams[0]));
	return leave(&g, rc);
}

int owcu_again(struct owcu_lane *l, int count, struct owcu_error *e)
{
	struct guard g;
	int rc = enter(&g, l->ctx, e);

	for (int i = 0; rc == 0 && i < count; i++)
		for (int k = 0; rc == 0 && k < l->nslots; k++)
			rc = launch_all(l, l->slots[k], l->streams[1], e);
	if (!owcu_forked())
		rc |= TRY(stream_sync, (l->streams[1]));
	return leave(&g, rc);
}

int owcu_timing(struct owcu_lane *l, int on, struct owcu_error *e)
{
	struct guard g;
	int rc = enter(&g, l->ctx, e);

	l->timed = 0;
	if (rc == 0 && on) {
		if (l->origin == NULL)
			rc = TRY(event_create, (&l->origin, 0));
		for (int i = 0; rc == 0 && i < 4 * l->nslots; i++)
			if (l->slots[i / 4]->marks[i % 4] == NULL)
				rc = TRY(event_create, (&l->slots[i / 4]->marks[i % 4], 0));
		if (rc == 0)
			rc = TRY(event_record, (l->origin, l->streams[0])) || TRY(stream_sync, (l->streams[0])) ? -1 : 0;
		l->timed = rc == 0;
	}
	return leave(&g, rc);
}

void **owcu_list_new(void) { return calloc(1, sizeof(void *)); }

void *owcu_list_take(void **list) { return __atomic_exchange_n(list, NULL, __ATOMIC_ACQ_REL); }
