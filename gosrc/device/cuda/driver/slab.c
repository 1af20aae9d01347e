// Memory, streams and events that are made together, and end together.
#include "call.h"

#include <stdlib.h>

int owcu_slab_free_entered(struct owcu_slab *slab, struct owcu_error *e)
{
	int left = 0;

	for (int i = 0; i < slab->nstreams; i++)
		if (slab->streams[i] && TRY(stream_sync, (slab->streams[i])) && !is_device_lost())
			return 1;
	for (int i = 0; i < slab->nevents; i++)
		DROP(slab->events[i], event_destroy);
	for (int i = 0; i < slab->nstreams; i++)
		DROP(slab->streams[i], stream_destroy);
	DROP(slab->device, mem_free);
	DROP(slab->host, host_unregister);
	if (left)
		return 1;
	free(slab->streams);
	*slab = (struct owcu_slab){0};
	return 0;
}

int owcu_slab_fill_entered(struct owcu_slab *slab, void *host, uint64_t n, uint64_t room, int nstreams, int nevents, int sleepers, struct owcu_error *e)
{
	slab->streams = calloc((size_t)(nstreams + nevents), sizeof *slab->streams);
	if (slab->streams == NULL)
		return record_error(e, "calloc", OWCU_OUT_OF_MEMORY);
	slab->events = slab->streams + nstreams;
	slab->nstreams = nstreams;
	slab->nevents = nevents;
	if (TRY(host_register, (host, n, PORTABLE_MAPPED)))
		return -1;
	slab->host = host;
	if (TRY(host_pointer, (&slab->mapped, host, 0)) || (room && TRY(mem_alloc, (&slab->device, room))))
		return -1;
	for (int i = 0; i < nstreams; i++)
		if (TRY(stream_create, (&slab->streams[i], NON_BLOCKING)))
			return -1;
	for (int i = 0; i < nevents; i++)
		if (TRY(event_create, (&slab->events[i], NO_TIMING | (i < sleepers ? BLOCKING_SYNC : 0))))
			return -1;
	return 0;
}

int owcu_slab_new(owcu_handle ctx, struct owcu_slab *slab, void *host, uint64_t n, uint64_t room, int nstreams, int nevents,
                  int sleepers, struct owcu_error *e)
{
	struct owcu_guard g;
	struct owcu_error ignored = {0};
	int rc = enter(&g, ctx, e);

	if (rc == 0 && (rc = owcu_slab_fill_entered(slab, host, n, room, nstreams, nevents, sleepers, e)) &&
	    owcu_slab_free_entered(slab, &ignored))
		rc = 1;
	return leave(&g, rc);
}

int owcu_slab_free(owcu_handle ctx, struct owcu_slab *slab, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = enter_to_free(&g, ctx, e);

	if (rc)
		return rc;
	rc = owcu_slab_free_entered(slab, e);
	return leave(&g, rc ? rc : e->call != NULL ? -1 : 0);
}
