//go:build cgo

#include "pack.h"

#include "call.h"

enum { PACK_NON_BLOCKING = 1, PACK_QUIET = 1 | 2, PACK_PORTABLE_MAPPED = 1 | 2 };

// settle waits for all work of a pack.
static void settle(struct owcu_pack *p)
{
	for (int i = 0; i < OWCU_PACK_COPIERS; i++)
		if (p->copiers[i])
			owcu->stream_sync(p->copiers[i]);
	for (int i = 0; i < p->slots; i++)
		if (p->streams[i])
			owcu->stream_sync(p->streams[i]);
}

// unpack frees what there is of a pack, and returns 1 if the driver refused some.
static int unpack(struct owcu_pack *p, struct owcu_error *e)
{
	int left = 0;

	settle(p);
	for (int i = 0; i < p->slots; i++) {
		DROP(p->events[i], event_destroy);
		DROP(p->streams[i], stream_destroy);
	}
	for (int i = 0; i < OWCU_PACK_COPIERS; i++)
		DROP(p->copiers[i], stream_destroy);
	DROP(p->device, mem_free);
	DROP(p->host, host_unregister);
	return left;
}

int owcu_pack_new(owcu_handle ctx, struct owcu_pack *p, void *host, uint64_t n, uint64_t room, struct owcu_error *e)
{
	struct owcu_guard g;
	struct owcu_error ignored = {0};
	int rc = enter(&g, ctx, e);

	if (rc)
		return rc;
	if (TRY(host_register, (host, n, PACK_PORTABLE_MAPPED)))
		return leave(&g, -1);
	p->host = host;
	rc = TRY(host_pointer, (&p->mapped, host, 0)) || TRY(mem_alloc, (&p->device, room)) ? -1 : 0;
	for (int i = 0; rc == 0 && i < OWCU_PACK_COPIERS; i++)
		rc = TRY(stream_create, (&p->copiers[i], PACK_NON_BLOCKING));
	for (int i = 0; rc == 0 && i < p->slots; i++)
		rc = TRY(stream_create, (&p->streams[i], PACK_NON_BLOCKING)) || TRY(event_create, (&p->events[i], PACK_QUIET)) ? -1 : 0;
	if (rc && unpack(p, &ignored))
		rc = 1;
	return leave(&g, rc);
}

int owcu_pack_free(owcu_handle ctx, struct owcu_pack *p, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = retire(&g, ctx, e);

	if (rc)
		return rc;
	rc = unpack(p, e);
	return leave(&g, rc ? rc : e->call != NULL ? -1 : 0);
}

int owcu_pack_encode(owcu_handle ctx, struct owcu_pack *p, int slot, owcu_handle kernel, owcu_ptr items, uint32_t n, uint32_t threads,
                     struct owcu_error *e)
{
	struct owcu_guard g;
	void *args[] = {&items, &n};
	int rc = enter(&g, ctx, e);

	if (rc == 0) {
		rc = TRY(launch, (kernel, n, 1, 1, threads, 1, 1, 0, p->streams[slot], args, NULL)) ||
		     TRY(event_record, (p->events[slot], p->streams[slot])) ? -1 : 0;
		if (rc)
			owcu->stream_sync(p->streams[slot]);
	}
	return leave(&g, rc);
}

int owcu_pack_fetch(owcu_handle ctx, struct owcu_pack *p, int slot, uint64_t n, const struct owcu_fetch *copies, struct owcu_error *e)
{
	struct owcu_guard g;
	owcu_handle copier = p->copiers[slot % OWCU_PACK_COPIERS];
	int rc = enter(&g, ctx, e);

	if (rc)
		return rc;
	for (uint64_t i = 0; rc == 0 && i < n; i++)
		rc = TRY(copy_out_async, (copies[i].dst, copies[i].src, copies[i].n, copier));
	if (rc == 0)
		rc = TRY(event_record, (p->events[slot], copier));
	if (rc)
		owcu->stream_sync(copier); // some of it may run
	return leave(&g, rc);
}

int owcu_pack_wait(owcu_handle ctx, struct owcu_pack *p, int slot, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = enter(&g, ctx, e);

	if (rc && enter(&g, ctx, e)) // as owcu_wait
		return rc;
	if (rc == 0)
		rc = TRY(event_sync, (p->events[slot]));
	if (rc)
		settle(p);
	return leave(&g, rc);
}
