// Encodes chunks on a device and copies them to the host.
#include "pack.h"

#include "../driver/call.h"

// sync_streams waits for all work of a pack.
static void sync_streams(const struct owcu_arena *arena)
{
	for (int i = 0; i < arena->nstreams; i++)
		owcu->stream_sync(arena->streams[i]);
}

int owcu_pack_launch(owcu_handle ctx, const struct owcu_arena *arena, int slot, owcu_handle kernel, owcu_ptr items, uint32_t n,
                     uint32_t threads, struct owcu_error *e)
{
	struct owcu_guard g;
	void *args[] = {&items, &n};
	int rc = enter(&g, ctx, e);

	if (rc == 0) {
		rc = TRY(launch, (kernel, n, 1, 1, threads, 1, 1, 0, arena->streams[slot], args, NULL)) ||
		     TRY(event_record, (arena->events[slot], arena->streams[slot])) ? -1 : 0;
		if (rc)
			owcu->stream_sync(arena->streams[slot]);
	}
	return leave(&g, rc);
}

int owcu_pack_fetch(owcu_handle ctx, const struct owcu_arena *arena, int slot, uint64_t n,
                    const struct owcu_fetch *copies, struct owcu_error *e)
{
	struct owcu_guard g;
	owcu_handle copier = arena->streams[arena->nevents + slot % OWCU_PACK_COPIERS];
	int rc = enter(&g, ctx, e);

	if (rc)
		return rc;
	for (uint64_t i = 0; rc == 0 && i < n; i++)
		rc = TRY(copy_out_async, (copies[i].dst, copies[i].src, copies[i].n, copier));
	if (rc == 0)
		rc = TRY(event_record, (arena->events[slot], copier));
	if (rc)
		owcu->stream_sync(copier); // some of the copies may be running
	return leave(&g, rc);
}

int owcu_pack_wait(owcu_handle ctx, const struct owcu_arena *arena, int slot, struct owcu_error *e)
{
	struct owcu_guard g;
	int out, rc = enter_to_wait(&g, ctx, WAIT_TRIES, &out, e);

	if (out)
		return out;
	if (rc == 0)
		rc = TRY(event_sync, (arena->events[slot]));
	if (rc)
		sync_streams(arena);
	return leave(&g, rc);
}
