// Helps every function that calls the driver: it calls through the table, records the first error, and makes the
// device's context current and restores the previous one.
#ifndef OWCU_CALL_H
#define OWCU_CALL_H

#include "context.h"

#include <stdio.h>
#include <time.h>

// record_error records the first error of a function.
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

// The symbol's name, for messages.
#define OWCU_NAME(field, symbol, args) static const char name_##field[] __attribute__((unused)) = symbol;
OWCU_FUNCTIONS(OWCU_NAME)

#define TRY(field, args) (record_error(e, name_##field, owcu->field args))

enum {
	NON_BLOCKING = 1,        // CU_STREAM_NON_BLOCKING
	BLOCKING_SYNC = 1,       // CU_EVENT_BLOCKING_SYNC: waiters sleep
	NO_TIMING = 2,           // CU_EVENT_DISABLE_TIMING
	PORTABLE_MAPPED = 1 | 2, // CU_MEMHOSTREGISTER_PORTABLE | DEVICEMAP
};

enum {
	CAPTURE_RELAXED = 2, // CU_STREAM_CAPTURE_MODE_RELAXED
	CAPTURE_UNKNOWN = -1,
	NO_CONTEXT = 201, // CUDA_ERROR_INVALID_CONTEXT
	WAIT_TRIES = 500, // of enter_to_wait: five seconds
};

// relax_mode puts the thread into the relaxed mode of stream capture, and restore_mode restores its mode. In the
// default mode, most calls destroy a capture of torch's on any thread.
static inline void restore_mode(int *mode)
{
	// Twice, with the same value: the thread is not ours and must not keep our mode.
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
		*mode = CAPTURE_UNKNOWN; // nothing was changed
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

// After an error nothing is changed, and leave does nothing.
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

// WITHIN makes calls, joined by ||, in the context, and is 0 or -1.
#define WITHIN(ctx, calls)                                                                                             \
	({                                                                                                             \
		struct owcu_guard guard;                                                                               \
		int result = enter(&guard, ctx, e);                                                                    \
		leave(&guard, result == 0 && (calls) ? -1 : result);                                                   \
	})

// RELAXED is WITHIN for calls that need no context.
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

// refuse_captured refuses a stream that is being captured: work queued there would
// become part of a graph, and queries would destroy it.
static inline int refuse_captured(uint64_t stream, struct owcu_error *e)
{
	int status = 0;
	int code = owcu->stream_capturing(stream_handle(stream), &status);

	if (code == OWCU_IMPLICIT || (code == 0 && status != 0))
		code = OWCU_CAPTURED;
	return record_error(e, name_stream_capturing, code);
}

// is_device_lost reports whether the device is lost: it answers no query, and what could not be freed is gone
// with it.
static inline int is_device_lost(void)
{
	size_t a, b;
	int code = owcu->mem_info(&a, &b);

	return code != 0 && code != NO_CONTEXT; // the thread is at fault, not the device
}

// enter_to_free is enter for calls that free something. It returns 1 if the driver refuses now but may not later.
// On a lost device, resources count as freed.
static inline int enter_to_free(struct owcu_guard *g, owcu_handle ctx, struct owcu_error *e)
{
	if (enter(g, ctx, e) == 0)
		return 0;
	return owcu_forked() ? -1 : !is_device_lost();
}

// enter_to_wait is enter for calls after which memory is used again, so work on it must have ended. A driver that
// refuses is asked again a hundred times per second. It returns the first refusal, 0 or -1; the caller waits in
// any case. *out is not 0 if the thread is not in the context: -1 if the device is lost or the process is a
// child, and 1 if nothing is known of the work.
static inline int enter_to_wait(struct owcu_guard *g, owcu_handle ctx, int tries, int *out, struct owcu_error *e)
{
	int rc = enter(g, ctx, e);

	for (*out = rc ? enter_to_free(g, ctx, e) : 0; *out > 0 && --tries > 0; *out = enter_to_free(g, ctx, e))
		nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
	return rc;
}

// DROP frees one resource, unless there is none or an earlier try has freed it. `left` records that the driver
// refused.
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
