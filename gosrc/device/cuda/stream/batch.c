// Queues work on a caller's stream and copies results back.
#include "batch.h"

#include "../driver/call.h"

static int run_steps(const struct owcu_batch *b, struct owcu_error *e)
{
	owcu_handle stream = stream_handle(b->stream);

	if (refuse_captured(b->stream, e) || (b->bytes && TRY(copy_in, (b->to, b->table, b->bytes, stream))))
		return -1;
	for (uint32_t i = 0; i < b->nsteps; i++) {
		const struct owcu_step *s = &b->steps[i];
		void *args[OWCU_ARGS];
		for (int k = 0; k < OWCU_ARGS; k++)
			args[k] = (void *)&s->args[k];
		if (s->few)
			args[OWCU_ARGS - 1] = b->table;
		if (TRY(launch, (s->kernel, s->grid, 1, 1, s->block, 1, 1, s->shared, stream, args, NULL)))
			return -1;
	}
	if ((b->back && TRY(copy_out_async, ((char *)b->table + b->back_at, b->to + b->back_at, b->back, stream))) ||
	    TRY(event_record, (b->done, stream)))
		return -1;
	return b->wait ? TRY(event_sync, (b->done)) : 0;
}

int owcu_submit_batch(const struct owcu_batch *b, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = enter(&g, b->ctx, e);

	if (rc == 0) {
		rc = run_steps(b, e);
		// Some of the work may still be using memory that is about to be reused.
		if (rc && e->code != OWCU_CAPTURED)
			owcu->stream_sync(stream_handle(b->stream));
	}
	return leave(&g, rc);
}

int owcu_wait_batch(owcu_handle ctx, owcu_handle done, struct owcu_error *e)
{
	struct owcu_guard g;
	int out, rc = enter_to_wait(&g, ctx, 1, &out, e);

	if (out)
		return out;
	if (rc == 0)
		rc = TRY(event_sync, (done));
	if (rc)
		owcu->event_sync(done); // after any error, all work on the memory must still have ended
	return leave(&g, rc);
}

int owcu_is_batch_done(owcu_handle ctx, owcu_handle done, struct owcu_error *e)
{
	struct owcu_guard g;
	int code, out, rc = enter_to_wait(&g, ctx, 1, &out, e);

	if (out)
		return out < 0 ? -1 : 0;
	code = rc == 0 ? owcu->event_query(done) : 0;
	if (code != OWCU_NOT_READY && record_error(e, name_event_query, code))
		rc = -1;
	if (rc)
		owcu->event_sync(done); // as in owcu_wait_batch
	return leave(&g, rc ? rc : code == 0);
}
