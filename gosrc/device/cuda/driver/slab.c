// Memory, streams and events that are made together, and end together.
#include "call.h"

#include <stdlib.h>

int owcu_close_slab(struct owcu_slab *p, struct owcu_error *e)
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
	*p = (struct owcu_slab){0};
	return 0;
}

int owcu_open_slab(struct owcu_slab *p, void *host, uint64_t n, uint64_t room, int nstreams, int nevents, int sleepers, struct owcu_error *e)
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

int owcu_slab_new(owcu_handle ctx, struct owcu_slab *p, void *host, uint64_t n, uint64_t room, int nstreams, int nevents, int sleepers,
                 struct owcu_error *e)
{
	struct owcu_guard g;
	struct owcu_error ignored = {0};
	int rc = enter(&g, ctx, e);

	if (rc == 0 && (rc = owcu_open_slab(p, host, n, room, nstreams, nevents, sleepers, e)) && owcu_close_slab(p, &ignored))
		rc = 1;
	return leave(&g, rc);
}

int owcu_slab_free(owcu_handle ctx, struct owcu_slab *p, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = retire(&g, ctx, e);

	if (rc)
		return rc;
	rc = owcu_close_slab(p, e);
	return leave(&g, rc ? rc : e->call != NULL ? -1 : 0);
}
