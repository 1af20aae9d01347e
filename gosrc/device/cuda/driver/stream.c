// Implements copies on streams that the caller selects, and dependencies between streams.
#include "call.h"

enum { POINTER_DEVICE = 9 }; // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL

int owcu_copy(owcu_handle ctx, uint64_t stream, owcu_ptr dst, owcu_ptr src, uint64_t n, int wait, struct owcu_error *e)
{
	return WITHIN(ctx, refuse_captured(stream, e) || TRY(copy_any, (dst, src, n, stream_handle(stream))) || (wait && TRY(stream_sync, (stream_handle(stream)))));
}

// follow_streams makes a stream wait for the work that is now queued on other streams.
static int follow_streams(owcu_handle stream, const uint64_t *after, uint64_t n, owcu_handle event, struct owcu_error *e)
{
	for (uint64_t i = 0; i < n; i++)
		if (stream_handle(after[i]) != stream &&
		    (refuse_captured(after[i], e) || TRY(event_record, (event, stream_handle(after[i]))) || TRY(stream_wait, (stream, event, 0))))
			return -1;
	return 0;
}

int owcu_stream_follow(owcu_handle ctx, owcu_handle *event, uint64_t stream, const uint64_t *after, uint64_t nafter, struct owcu_error *e)
{
	return WITHIN(ctx, (*event == NULL && TRY(event_create, (event, NO_TIMING))) || refuse_captured(stream, e) ||
	                           follow_streams(stream_handle(stream), after, nafter, *event, e));
}

int owcu_stream_new(owcu_handle ctx, uint64_t *stream, struct owcu_error *e)
{
	owcu_handle created = NULL;
	int rc = WITHIN(ctx, TRY(stream_create, (&created, NON_BLOCKING)));

	*stream = (uint64_t)(uintptr_t)created;
	return rc;
}

int owcu_stream_free(owcu_handle ctx, uint64_t stream, struct owcu_error *e)
{
	return WITHIN(ctx, refuse_captured(stream, e) || TRY(stream_destroy, (stream_handle(stream))));
}

int owcu_stream_sync(owcu_handle ctx, uint64_t stream, struct owcu_error *e)
{
	return WITHIN(ctx, refuse_captured(stream, e) || TRY(stream_sync, (stream_handle(stream))));
}

int owcu_check_stream(owcu_handle ctx, uint64_t stream, int *here, struct owcu_error *e)
{
	owcu_handle of = NULL;
	int rc = WITHIN(ctx, TRY(stream_ctx, (stream_handle(stream), &of)));

	*here = rc == 0 && of == ctx;
	return rc;
}

int owcu_swap_capture_mode(int mode)
{
	return owcu == NULL || owcu_forked() || owcu->thread_mode(&mode) ? -1 : mode;
}

int owcu_pointer_device(owcu_ptr p)
{
	struct owcu_error ignored = {0};
	int device = -1, mode;

	if (owcu == NULL || relax_mode(&mode, &ignored))
		return -1;
	if (owcu->pointer_attribute(&device, POINTER_DEVICE, p))
		device = -1;
	restore_mode(&mode);
	return device;
}

int owcu_export_ipc(owcu_handle ctx, owcu_ptr p, struct owcu_ipc *handle, struct owcu_error *e)
{
	return WITHIN(ctx, TRY(ipc_get, (handle, p)));
}

int owcu_map_ipc(owcu_handle ctx, const struct owcu_ipc *handle, owcu_ptr *p, struct owcu_error *e)
{
	return WITHIN(ctx, TRY(ipc_open, (p, *handle, 1))); // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
}
