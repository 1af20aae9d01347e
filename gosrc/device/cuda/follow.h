// How work for a caller's stream comes after that of other streams.
#ifndef OWCU_FOLLOW_H
#define OWCU_FOLLOW_H

#include "call.h"

static inline owcu_handle handle(uint64_t stream) { return (owcu_handle)(uintptr_t)stream; }

// follow makes a stream wait for what is queued on others now.
static inline int follow(owcu_handle stream, const uint64_t *after, uint64_t n, owcu_handle event, struct owcu_error *e)
{
	for (uint64_t i = 0; i < n; i++)
		if (handle(after[i]) != stream &&
		    (uncaptured(after[i], e) || TRY(event_record, (event, handle(after[i]))) || TRY(stream_wait, (stream, event, 0))))
			return -1;
	return 0;
}

#endif
