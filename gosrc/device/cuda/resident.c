//go:build cgo

#include "resident.h"

#include "call.h"

static int run(const struct owcu_resident *r, struct owcu_error *e)
{
	owcu_handle stream = handle(r->stream);
	void *args[OWCU_RESIDENT_ARGS];

	for (int i = 0; i < OWCU_RESIDENT_ARGS; i++)
		args[i] = (void *)&r->args[i];
	if (uncaptured(r->stream, e) || TRY(copy_in, (r->to, r->table, r->bytes, stream)) ||
	    TRY(launch, (r->kernel, r->grid, 1, 1, r->block, 1, 1, 0, stream, args, NULL)) ||
	    (r->back && TRY(copy_out_async, ((char *)r->table + r->back_at, r->to + r->back_at, r->back, stream))) ||
	    TRY(event_record, (r->done, stream)))
		return -1;
	return TRY(event_sync, (r->done));
}

int owcu_resident(const struct owcu_resident *r, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = enter(&g, r->ctx, e);

	if (rc == 0) {
		rc = run(r, e);
		// Some of it may run, on memory that is about to be reused.
		if (rc && e->code != OWCU_CAPTURED)
			owcu->stream_sync(handle(r->stream));
	}
	return leave(&g, rc);
}
