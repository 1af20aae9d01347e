// Implements contexts, memory, events and modules of a device.
#include "call.h"

#include <stdlib.h>
#include <string.h>

enum {
	ATTRIBUTE_SMS = 16,
	ATTRIBUTE_MAJOR = 75,
	ATTRIBUTE_MINOR = 76,
	ATTRIBUTE_COHERENT = 100, // CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
};

int owcu_enter(struct owcu_guard *g, owcu_handle ctx, struct owcu_error *e) { return enter(g, ctx, e); }

void owcu_leave(struct owcu_guard *g) { leave(g, 0); }

int owcu_init_driver(int *version, int *count, struct owcu_error *e)
{
	if (owcu_forked() ? record_error(e, "fork", OWCU_FORKED) : TRY(init, (0))) // capture modes do not exist before init
		return -1;
	return RELAXED(TRY(driver_version, (version)) || TRY(device_count, (count)));
}

int owcu_get_device_info(int ordinal, struct owcu_info *info, struct owcu_error *e)
{
	int d;
	size_t n = 0;
	int rc = RELAXED(TRY(device_get, (&d, ordinal)) || TRY(device_name, (info->name, sizeof info->name, d)) ||
	                 TRY(device_bus, (info->bus, sizeof info->bus, d)) || TRY(device_memory, (&n, d)) ||
	                 TRY(device_attribute, (&info->major, ATTRIBUTE_MAJOR, d)) ||
	                 TRY(device_attribute, (&info->minor, ATTRIBUTE_MINOR, d)) || TRY(device_attribute, (&info->sms, ATTRIBUTE_SMS, d)) ||
	                 TRY(device_attribute, (&info->coherent, ATTRIBUTE_COHERENT, d)));

	info->memory = n;
	return rc;
}

int owcu_ctx_open(int ordinal, int *device, owcu_handle *ctx, int *coherent, int *sms, struct owcu_error *e)
{
	return RELAXED(TRY(device_get, (device, ordinal)) || TRY(device_attribute, (coherent, ATTRIBUTE_COHERENT, *device)) ||
	               TRY(device_attribute, (sms, ATTRIBUTE_SMS, *device)) || TRY(ctx_retain, (ctx, *device)));
}

int owcu_ctx_close(int device, struct owcu_error *e)
{
	int mode;

	if (relax_mode(&mode, e) && relax_mode(&mode, e)) // try again once
		return -1;
	int rc = TRY(ctx_release, (device));
	restore_mode(&mode);
	return rc;
}

int owcu_alloc(owcu_handle ctx, int64_t n, const uint64_t *sizes, owcu_ptr *out, struct owcu_error *e)
{
	struct owcu_guard g;
	int64_t i = 0;
	int rc = enter(&g, ctx, e);

	for (; rc == 0 && i < n; i++) {
		rc = TRY(mem_alloc, (&out[i], sizes[i]));
		if (rc)
			break;
	}
	for (int64_t k = rc ? 0 : n; k < n; k++)
		if (k >= i || owcu->mem_free(out[k]) == 0 || is_device_lost())
			out[k] = 0;
	return leave(&g, rc);
}

int owcu_free(owcu_handle ctx, int64_t n, owcu_ptr *p, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = enter_to_free(&g, ctx, e);

	if (rc)
		return rc;
	for (int64_t i = 0; i < n; i++) {
		int refused = TRY(mem_free, (p[i]));
		rc |= refused;
		if (!refused || is_device_lost())
			p[i] = 0;
	}
	return leave(&g, rc);
}

int owcu_try_record_events(owcu_handle ctx, int n, const uint64_t *streams, owcu_handle *events, struct owcu_error *e)
{
	struct owcu_guard g;
	struct owcu_error not_now = {0};
	int rc = enter(&g, ctx, e), captured = 0;

	// Check first, so that nothing is recorded into a graph. Check again afterwards, in case a capture began in
	// between: an event recorded in a capture must not be queried.
	for (int again = 0; rc == 0 && !captured && again < 2; again++) {
		for (int i = 0; rc == 0 && !captured && i < n; i++) {
			if (refuse_captured(streams[i], &not_now)) {
				captured = not_now.code == OWCU_CAPTURED;
				rc = captured ? 0 : record_error(e, not_now.call, not_now.code);
			} else if (!again) {
				rc = (events[i] == NULL && TRY(event_create, (&events[i], NO_TIMING))) ||
				     TRY(event_record, (events[i], stream_handle(streams[i]))) ? -1 : 0;
			}
		}
	}
	return leave(&g, rc && !is_device_lost() ? rc : captured);
}

int owcu_events_passed(owcu_handle ctx, int n, const owcu_handle *events, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = enter(&g, ctx, e), passed = 1;

	for (int i = 0; rc == 0 && passed && i < n; i++) {
		int code = events[i] != NULL ? owcu->event_query(events[i]) : 0;
		passed = code != OWCU_NOT_READY;
		rc = passed ? record_error(e, name_event_query, code) : 0;
	}
	return leave(&g, rc && !is_device_lost() ? rc : passed);
}

int owcu_register(owcu_handle ctx, void *p, uint64_t n, struct owcu_error *e)
{
	return WITHIN(ctx, TRY(host_register, (p, n, PORTABLE_MAPPED)));
}

int owcu_try_release(owcu_handle ctx, int what, void *thing, struct owcu_error *e)
{
	struct owcu_guard g;
	owcu_ptr p = (owcu_ptr)(uintptr_t)thing;
	int rc = enter_to_free(&g, ctx, e), left = 0;

	if (rc)
		return rc;
	switch (what) {
	case OWCU_EVENT:
		DROP(thing, event_destroy);
		break;
	case OWCU_STREAM:
		DROP(thing, stream_destroy);
		break;
	case OWCU_PINNED:
		DROP(thing, host_unregister);
		break;
	case OWCU_ATTACHED:
		DROP(p, ipc_close);
		break;
	}
	return leave(&g, left);
}

int owcu_memory_info(owcu_handle ctx, uint64_t *unused, uint64_t *total, struct owcu_error *e)
{
	size_t a = 0, b = 0;
	int rc = WITHIN(ctx, TRY(mem_info, (&a, &b)));

	*unused = a;
	*total = b;
	return rc;
}

int owcu_copy_to_host(owcu_handle ctx, owcu_handle *stream, void *dst, owcu_ptr src, uint64_t n, struct owcu_error *e)
{
	return WITHIN(ctx, (*stream == NULL && TRY(stream_create, (stream, NON_BLOCKING))) ||
	                           (TRY(copy_out_async, (dst, src, n, *stream)) | TRY(stream_sync, (*stream))));
}

int owcu_module_open(owcu_handle ctx, const void *image, uint64_t n, const char *names, int count, struct owcu_module *m,
                     owcu_handle *kernels, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = enter(&g, ctx, e);

	// The driver needs an aligned image, and may read it again when a kernel is first launched.
	if (rc == 0 && m->image == NULL) {
		if (posix_memalign(&m->image, 64, n)) {
			m->image = NULL;
			rc = record_error(e, "posix_memalign", OWCU_OUT_OF_MEMORY);
		} else {
			memcpy(m->image, image, n);
		}
	}
	if (rc == 0 && m->module == NULL)
		rc = TRY(module_load, (&m->module, m->image));
	for (int i = 0; rc == 0 && i < count; i++, names += strlen(names) + 1)
		rc = TRY(module_function, (&kernels[i], m->module, names));
	return leave(&g, rc);
}

int owcu_module_close(owcu_handle ctx, struct owcu_module *m, struct owcu_error *e)
{
	struct owcu_guard g;
	int rc = enter_to_free(&g, ctx, e);

	if (rc)
		return rc;
	if (m->module != NULL && TRY(module_unload, (m->module))) {
		rc = is_device_lost() ? -1 : 1;
		if (rc > 0)
			return leave(&g, rc);
	}
	free(m->image);
	m->module = m->image = NULL;
	return leave(&g, rc);
}

int owcu_stream_follow_event(owcu_handle ctx, owcu_handle event, uint64_t stream, struct owcu_error *e)
{
	return WITHIN(ctx, refuse_captured(stream, e) || TRY(stream_wait, (stream_handle(stream), event, 0)));
}
