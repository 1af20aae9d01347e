// What every function that calls the driver needs: its table tried, the first
// error noted, the device's context made current and put back.
#ifndef OWCU_CALL_H
#define OWCU_CALL_H

#include "lane.h"

#include <stdio.h>

// failed notes the first error of a function.
static inline int failed(struct owcu_error *e, const char *call, int code)
{
	const char *name = NULL, *text = NULL;

	if (code == 0)
		return 0;
	if (e->call == NULL) {
		e->call = call;
		e->code = code;
		if (code != OWCU_FORKED && owcu != NULL) {
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

#define TRY(field, args) (failed(e, name_##field, owcu->field args))

// A guard keeps the thread's context.
struct guard {
	owcu_handle before, ctx;
};

static inline int enter(struct guard *g, owcu_handle ctx, struct owcu_error *e)
{
	g->ctx = ctx;
	g->before = ctx;
	if (owcu_forked())
		return failed(e, "fork", OWCU_FORKED);
	if (TRY(ctx_get, (&g->before))) {
		g->before = ctx;
		return -1;
	}
	if (g->before != ctx && TRY(ctx_set, (ctx))) {
		g->before = ctx;
		return -1;
	}
	return 0;
}

static inline int leave(struct guard *g, int rc)
{
	if (g->before != g->ctx && !owcu_forked())
		owcu->ctx_set(g->before);
	return rc;
}

#endif
