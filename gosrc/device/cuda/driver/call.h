// Defines helpers for functions that call the driver. They call through the table, record the first error, make the
// device's context current, and restore the previous context.
#ifndef OWCU_CALL_H
#define OWCU_CALL_H

#include "context.h"

#include <stdio.h>
#include <time.h>

// record_error records the first error of a function, and returns -1 for any error.
static inline int record_error(struct owcu_error *e, const char *call, int code)
{
	const char *name = NULL, *text = NULL;

	if (code == 0)
		return 0;
	if (e->call == NULL) {
		e->call = call;
		e->code = code;
		if (code > 0 && owcu != NULL) {
			owcu->error_name(code, &name);
			owcu->error_text(code, &text);
		}
		snprintf(e->text, sizeof e->text, "%s: %s", name ? name : "unknown error", text ? text : "");
	}
	return -1;
}

// name_FIELD is the symbol of a function, for messages.
#define OWCU_NAME(field, symbol, args) static const char name_##field[] __attribute__((unused)) = symbol;
OWCU_FUNCTIONS(OWCU_NAME)

#define TRY(field, args) (record_error(e, name_##field, owcu->field args))

enum {
	NON_BLOCKING = 1,        // CU_STREAM_NON_BLOCKING
	BLOCKING_SYNC = 1,       // CU_EVENT_BLOCKING_SYNC: waiting threads sleep
	NO_TIMING = 2,           // CU_EVENT_DISABLE_TIMING
	PORTABLE_MAPPED = 1 | 2, // CU_MEMHOSTREGISTER_PORTABLE | DEVICEMAP
};

enum {
	CAPTURE_RELAXED = 2, // CU_STREAM_CAPTURE_MODE_RELAXED
	CAPTURE_UNKNOWN = -1,
	NO_CONTEXT = 201, // CUDA_ERROR_INVALID_CONTEXT
	WAIT_TRIES = 500, // for enter_to_wait: five seconds
};

// relax_mode sets the thread's mode of stream capture to relaxed, and restore_mode restores the previous mode. In the
// default mode, most calls destroy a capture that torch has in progress on any thread.
static inline void restore_mode(int *mode)
{
	// Try twice with the same value: the thread belongs to the caller and must not keep our mode.
	for (int i = 0, put = *mode; i < 2 && put != CAPTURE_UNKNOWN && !owcu_forked(); i++, put = *mode)
		if (owcu->thread_mode(&put) == 0)
			break;
	*mode = CAPTURE_UNKNOWN;
}

static inline int relax_mode(int *mode, struct owcu_error *e)
{
	*mode = CAPTURE_RELAXED;
	if (owcu_forked())
		record_error(e, "fork", OWCU_FORKED);
	else if (TRY(thread_mode, (mode)) == 0)
		return 0;
	if (*mode == CAPTURE_RELAXED)
		*mode = CAPTURE_UNKNOWN; // the mode was not changed
	restore_mode(mode);
	return -1;
}

static inline int leave(struct owcu_guard *g, int rc)
{
	if (g->before != g->ctx && !owcu_forked())
		owcu->ctx_set(g->before);
	restore_mode(&g->mode);
	return rc;
}

// enter makes the context current. If it fails, it has no effect, and leave does nothing.
static inline int enter(struct owcu_guard *g, owcu_handle ctx, struct owcu_error *e)
{
	g->ctx = g->before = ctx;
	if (relax_mode(&g->mode, e))
		return -1;
	if (TRY(ctx_get, (&g->before)))
		g->before = ctx;
	else if (g->before == ctx || TRY(ctx_set, (ctx)) == 0)
		return 0;
	g->before = ctx;
	return leave(g, -1);
}

// WITHIN makes calls, joined by ||, in the context. Its value is 0, or -1 after an error.
#define WITHIN(ctx, calls)                                                                                             \
	({                                                                                                             \
		struct owcu_guard guard;                                                                               \
		int result = enter(&guard, ctx, e);                                                                    \
		leave(&guard, result == 0 && (calls) ? -1 : result);                                                   \
	})

// RELAXED is like WITHIN for calls that need no context.
#define RELAXED(calls)                                                                                                 \
	({                                                                                                             \
		int mode, result = relax_mode(&mode, e);                                                               \
		if (result == 0) {                                                                                     \
			result = (calls) ? -1 : 0;                                                                     \
			restore_mode(&mode);                                                                           \
		}                                                                                                      \
		result;                                                                                                \
	})

static inline owcu_handle stream_handle(uint64_t stream) { return (owcu_handle)(uintptr_t)stream; }

// refuse_captured records an error if a stream is being captured. Work queued there
// would become part of a graph, and queries would destroy the capture.
static inline int refuse_captured(uint64_t stream, struct owcu_error *e)
{
	int status = 0;
	int code = owcu->stream_capturing(stream_handle(stream), &status);

	if (code == OWCU_IMPLICIT || (code == 0 && status != 0))
		code = OWCU_CAPTURED;
	return record_error(e, name_stream_capturing, code);
}

// is_device_lost reports whether the device is lost. A lost device fails all queries, and resources that could not be
// freed no longer exist.
static inline int is_device_lost(void)
{
	size_t a, b;
	int code = owcu->mem_info(&a, &b);

	return code != 0 && code != NO_CONTEXT; // NO_CONTEXT is an error of the thread, not of the device
}

// enter_to_free is like enter, for functions that free resources. It returns 1 if the driver failed but may succeed
// later, and -1 if the resources count as freed, because the device is lost or the process is a forked child.
static inline int enter_to_free(struct owcu_guard *g, owcu_handle ctx, struct owcu_error *e)
{
	if (enter(g, ctx, e) == 0)
		return 0;
	return owcu_forked() ? -1 : !is_device_lost();
}

// enter_to_wait is like enter, for functions after which memory is reused, so work on it must have ended. If the driver
// fails, it tries again a hundred times per second. It returns 0, or -1 if the first try failed; the caller must wait
// in either case. *out is 0 if the thread is in the context. Otherwise it is -1 if the device is lost or the process is
// a forked child, and 1 if the state of the work is unknown.
static inline int enter_to_wait(struct owcu_guard *g, owcu_handle ctx, int tries, int *out, struct owcu_error *e)
{
	int rc = enter(g, ctx, e);

	for (*out = rc ? enter_to_free(g, ctx, e) : 0; *out > 0 && --tries > 0; *out = enter_to_free(g, ctx, e))
		nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
	return rc;
}

// DROP frees a resource, unless it is 0 or an earlier try has freed it. If the driver fails, DROP sets
// `left`.
#define DROP(thing, field)                                                                                             \
	do {                                                                                                           \
		if (thing) {                                                                                           \
			if (TRY(field, (thing)) == 0 || is_device_lost())                                              \
				(thing) = 0;                                                                           \
			else                                                                                           \
				left = 1;                                                                              \
		}                                                                                                      \
	} while (0)

#endif
