// Allocates and frees arenas: host memory, device memory, streams and events that are used together.
#include "call.h"

#include <stdlib.h>

int owcu_arena_free_entered(struct owcu_arena *arena, struct owcu_error *e)
{
	int left = 0;

	for (int i = 0; i < arena->nstreams; i++)
		if (arena->streams[i] && TRY(stream_sync, (arena->streams[i])) && !is_device_lost())
			return 1;
	for (int i = 0; i < arena->nevents; i++)
		DROP(arena->events[i], event_destroy);
	for (int i = 0; i < arena->nstreams; i++)
		DROP(arena->streams[i], stream_destroy);
	DROP(arena->device, mem_free);
	DROP(arena->host, host_unregister);
	if (left)
		return 1;
	free(arena->streams);
	*arena = (struct owcu_arena){0};
	return 0;
}

int owcu_arena_fill_entered(struct owcu_arena *arena, void *host, uint64_t n, uint64_t room, int nstreams, int nevents, int sleepers, struct owcu_error *e)
{
	arena->streams = calloc((size_t)(nstreams + nevents), sizeof *arena->streams);
	if (arena->streams == NULL)
		return record_error(e, "calloc", OWCU_OUT_OF_MEMORY);
	arena->events = arena->streams + nstreams;
	arena->nstreams = nstreams;
	arena->nevents = nevents;
	if (TRY(host_register, (host, n, PORTABLE_MAPPED)))
		return -1;
	arena->host = host;
	if (TRY(host_pointer, (&arena->mapped, host, 0)) || (room && TRY(mem_alloc, (&arena->device, room))))
		return -1;
	for (int i = 0; i < nstreams; i++)
		if (TRY(stream_create, (&arena->streams[i], NON_BLOCKING)))
			return -1;
	for (int i = 0; i < nevents; i++)
		if (TRY(event_create, (&arena->events[i], NO_TIMING | (i < sleepers ? BLOCKING_SYNC : 0))))
			return -1;
	return 0;
}

int owcu_arena_new(owcu_handle ctx, struct owcu_arena *arena, void *host, uint64_t n, uint64_t room, int nstreams, int nevents,
                  int sleepers, struct owcu_error *e)
{
	struct owcu_guard g;
	struct owcu_error ignored = {0};
	int rc = enter(&g, ctx, e);

	if (rc == 0 && (rc = owcu_arena_fill_entered(arena, host, n, room, nstreams, nevents, sleepers, e)) &&
	    owcu_arena_free_entered(arena, &ignored))
		rc = 1;
	return leave(&g, rc);
}

int owcu_arena_free(owcu_handle ctx, struct owcu_arena *arena, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = enter_to_free(&g, ctx, e);

	if (rc)
		return rc;
	rc = owcu_arena_free_entered(arena, e);
	return leave(&g, rc ? rc : e->call != NULL ? -1 : 0);
}
