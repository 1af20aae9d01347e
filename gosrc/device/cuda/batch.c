//go:build cgo

#include "batch.h"

#include "call.h"

enum { STREAM_NON_BLOCKING = 1, EVENT_NO_TIMING = 2, POINTER_DEVICE = 9 };

static int queue(const struct owcu_batch *b, struct owcu_error *e)
{
	owcu_handle stream = handle(b->stream);

	if (uncaptured(b->stream, e) || (b->bytes && TRY(copy_in, (b->to, b->table, b->bytes, stream))))
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

int owcu_batch(const struct owcu_batch *b, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = enter(&g, b->ctx, e);

	if (rc == 0) {
		rc = queue(b, e);
		// Some of it may run, on memory that is about to be reused.
		if (rc && e->code != OWCU_CAPTURED)
			owcu->stream_sync(handle(b->stream));
	}
	return leave(&g, rc);
}

int owcu_batch_wait(owcu_handle ctx, owcu_handle event, int *ready, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = enter(&g, ctx, e);

	if (rc && enter(&g, ctx, e)) // as owcu_wait
		return rc;
	if (rc == 0 && ready != NULL) {
		int code = owcu->event_query(event);
		*ready = code == 0;
		rc = code == OWCU_NOT_READY ? 0 : failed(e, name_event_query, code);
	} else if (rc == 0) {
		rc = TRY(event_sync, (event));
	}
	if (rc)
		owcu->event_sync(event); // whatever is wrong with it, all work on the memory must have ended
	return leave(&g, rc);
}

int owcu_copy(owcu_handle ctx, uint64_t stream, owcu_ptr dst, owcu_ptr src, uint64_t n, int wait, struct owcu_error *e)
{
	return WITHIN(ctx, uncaptured(stream, e) || TRY(copy_any, (dst, src, n, handle(stream))) || (wait && TRY(stream_sync, (handle(stream)))));
}

int owcu_copy_rows(owcu_handle ctx, uint64_t stream, owcu_ptr dst, uint64_t dst_pitch, owcu_ptr src, uint64_t src_pitch, uint64_t width,
		   uint64_t rows, struct owcu_error *e)
{
	struct owcu_rows copy = {
		.src_kind = 2, .src = src, .src_pitch = src_pitch, .dst_kind = 2, .dst = dst, .dst_pitch = dst_pitch, .width = width, .height = rows};

	return WITHIN(ctx, uncaptured(stream, e) || TRY(copy_rows, (&copy, handle(stream))));
}

// follow makes a stream wait for what is queued on others now.
static int follow(owcu_handle stream, const uint64_t *after, uint64_t n, owcu_handle event, struct owcu_error *e)
{
	for (uint64_t i = 0; i < n; i++)
		if (handle(after[i]) != stream &&
		    (uncaptured(after[i], e) || TRY(event_record, (event, handle(after[i]))) || TRY(stream_wait, (stream, event, 0))))
			return -1;
	return 0;
}

int owcu_follow(owcu_handle ctx, owcu_handle *event, uint64_t stream, const uint64_t *after, uint64_t nafter, struct owcu_error *e)
{
	return WITHIN(ctx, (*event == NULL && TRY(event_create, (event, EVENT_NO_TIMING))) || uncaptured(stream, e) ||
	                           follow(handle(stream), after, nafter, *event, e));
}

int owcu_stream_new(owcu_handle ctx, uint64_t *stream, struct owcu_error *e)
{
	owcu_handle made = NULL;
	int rc = WITHIN(ctx, TRY(stream_create, (&made, STREAM_NON_BLOCKING)));

	*stream = (uint64_t)(uintptr_t)made;
	return rc;
}

int owcu_stream_free(owcu_handle ctx, uint64_t stream, struct owcu_error *e)
{
	return WITHIN(ctx, uncaptured(stream, e) || TRY(stream_destroy, (handle(stream))));
}

int owcu_stream_sync(owcu_handle ctx, uint64_t stream, struct owcu_error *e)
{
	return WITHIN(ctx, uncaptured(stream, e) || TRY(stream_sync, (handle(stream))));
}

int owcu_stream_here(owcu_handle ctx, uint64_t stream, int *here, struct owcu_error *e)
{
	owcu_handle of = NULL;
	int rc = WITHIN(ctx, TRY(stream_ctx, (handle(stream), &of)));

	*here = rc == 0 && of == ctx;
	return rc;
}

int owcu_thread_mode(int mode)
{
	return owcu == NULL || owcu_forked() || owcu->thread_mode(&mode) ? -1 : mode;
}

int owcu_pointer_device(owcu_ptr p)
{
	struct owcu_error ignored = {0};
	int device = -1, mode;

	if (owcu == NULL || relax(&mode, &ignored))
		return -1;
	if (owcu->pointer_attribute(&device, POINTER_DEVICE, p))
		device = -1;
	harden(&mode);
	return device;
}

int owcu_share(owcu_handle ctx, owcu_ptr p, struct owcu_ipc *handle, struct owcu_error *e)
{
	return WITHIN(ctx, TRY(ipc_get, (handle, p)));
}

int owcu_attach(owcu_handle ctx, const struct owcu_ipc *handle, owcu_ptr *p, struct owcu_error *e)
{
	return WITHIN(ctx, TRY(ipc_open, (p, *handle, 1))); // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
}
