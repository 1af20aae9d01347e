// Defines the state of the fake driver: memory, pins, streams and queued work. One lock guards all of it. Only fake.c
// includes this file.
#ifndef OWCU_FAKE_STATE_H
#define OWCU_FAKE_STATE_H

#include "fake.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../../../../cuda/abi.h"
#include "../../../../cuda/abi_crc.h"
#include "../../../../cuda/abi_move.h"
#include "../../../../cuda/abi_stream.h"

int ow_x16_host(int transform, const ow_x16_chunk *chunks, const ow_x16_seg *segs, uint32_t n, uint32_t *status);
void ow_move_host(const ow_move *moves, const ow_part *parts, uint32_t n);
void ow_cast_host(const ow_cast *casts, const ow_part *parts, uint32_t n);
void ow_crc_host(const ow_crc_part *parts, uint32_t *sums, uint32_t n);

void ow_stream_open_host(const ow_stream_head *head, ow_batch_item *rows, uint32_t n, uint32_t *status);
void ow_stream_close_host(const ow_stream_head *head, const ow_batch_item *rows, uint32_t n, uint32_t *status);
void ow_stream_peek_host(const ow_stream_head *head, ow_stream_peek_t *out, uint32_t n);
void ow_stream_x16_host(const ow_stream_head *head, uint32_t n, uint32_t *status);

void ow_stream_cut_host(const ow_stream_head *head, ow_batch_item *rows, uint32_t n);
void ow_stream_sum_host(const ow_stream_head *head, ow_batch_item *rows, uint32_t n, uint32_t *status);
void ow_stream_join_host(const ow_stream_head *head, const ow_batch_item *rows, uint32_t n, uint32_t *status);
void ow_cascaded_decode_host(ow_batch_item *items, uint32_t n);
void ow_x16_encode_host(ow_batch_item *items, uint32_t n);
void ow_hash_sums_host(ow_batch_item *items, uint32_t n);
void ow_lz4_decode_host(ow_batch_item *items, uint32_t n);
void ow_snappy_decode_host(ow_batch_item *items, uint32_t n);

// Indices in kernel_names.
enum { K_CRC = 10, K_OPEN, K_CLOSE, K_PEEK, K_X16, K_CUT, K_SUM, K_JOIN, K_LZ4, K_SNAPPY, K_CASCADED, K_ENCODE, K_HASH, K_DIGEST, K_DIGEST_KEYED, K_DELTA_APPLY, K_DELTA_MEASURE, K_DELTA_WRITE, K_ITEMS = K_LZ4, K_RESIDENT = K_DIGEST };

enum { UNSUPPORTED = 900, IMPLICIT = 906, RELAXED = 2 }; // error codes and mode of stream capture
enum { GUARD = 4096, ALIGN = 512, OOM = 2, INVALID = 1, NOT_INITIALIZED = 3, INVALID_CONTEXT = 201, INVALID_HANDLE = 400 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct owcu_fake_state st;
static int64_t fail_in;
static int fail_code, fail_sticky, lost, initialized;
static uint64_t total = 1 << 30;
static int version = 13000, devices = 2;

struct block {
	struct block *next;
	uint8_t *raw, *p;
	size_t n;
	int device;
	size_t shared; // bytes of the shared mapping at raw; 0 if it is not shared
	int file;      // file of the shared mapping; -1 if it belongs to another process
};
static struct block *blocks;

struct pin {
	struct pin *next;
	uint8_t *p;
	size_t n;
};
static struct pin *pins;

struct event {
	int64_t recorded, done; // records requested and reached
	int64_t when; // time when the last record was reached, in nanoseconds
	unsigned untimed;
	struct stream *stream;  // stream of the last record
	struct event *next;     // list of destroyed events
};
static struct event *ended;

enum op_kind { COPY, FILL, LAUNCH, RECORD, WAIT, BUSY };
struct op {
	struct op *next;
	enum op_kind kind;
	void *dst;
	const void *src;
	size_t n;
	int value, kernel;
	struct event *event;
	struct stream *recorder; // stream of the record that a wait refers to
	int64_t at;
	uint64_t a, b, status;
	const ow_stream_few *few; // copy of the table, if a is 0
	uint32_t warps;
	uint64_t args[3]; // arguments of the second module's kernels, besides a, b and n
};

struct stream {
	void *ctx; // NULL if any context may use it
	struct op *first, **last;
	int running, capturing;
};
// Handles below 16 are not pointers: 0 and 1 are the legacy stream, and 2 is the per-thread stream. Here they are all
// the same stream.
static struct stream shared_stream;

static __thread void *current;
static __thread int capture_mode;
static int captures, blocking_captures;
static int contexts_mark[8];

static void note_broken_rule(const char *what)
{
	if (st.broken++ == 0)
		snprintf(st.what, sizeof st.what, "%s", what);
}

static void lose_device(void); // ends all work of the device

// Names of the first calls since a reset, each with a newline.
static char history[64 << 10];
static size_t recorded;

// enter_queueing counts a call that only queues work or does not use the device, and returns its error code.
static int enter_queueing_as(const char *name, int needs_context)
{
	pthread_mutex_lock(&lock);
	st.calls++;
	if (recorded + strlen(name) + 2 < sizeof history)
		recorded += (size_t)snprintf(history + recorded, sizeof history - recorded, "%s\n", name);
	if (lost)
		return lost;
	if (fail_in > 0 && --fail_in == 0) {
		if (fail_sticky) {
			lost = fail_code;
			lose_device();
		}
		return fail_code;
	}
	if (!initialized)
		return NOT_INITIALIZED;
	if (needs_context && current == NULL)
		return INVALID_CONTEXT;
	return 0;
}
// enter_call does the same for all other calls, which destroy a capture.
static int enter_call_as(const char *name, int needs_context)
{
	int rc = enter_queueing_as(name, needs_context);

	if (captures > 0 && capture_mode != RELAXED) {
		note_broken_rule("a call that destroys a capture");
		rc = UNSUPPORTED;
	}
	return rc;
}
#define enter_queueing(needs_context) enter_queueing_as(__func__, needs_context)
#define enter_call(needs_context) enter_call_as(__func__, needs_context)

void owcu_fake_history(char *to, size_t n, int forget)
{
	pthread_mutex_lock(&lock);
	snprintf(to, n, "%s", history);
	if (forget)
		recorded = history[0] = 0;
	pthread_mutex_unlock(&lock);
}

// refuses_free reports whether a call that frees must do nothing. A lost device frees everything, so that leaks can be
// counted, and reports success unless fail_sticky is 2.
static int refuses_free(int *rc)
{
	if (lost && fail_sticky < 2)
		*rc = 0;
	return *rc != 0 && !lost;
}

static int leave_call(int rc)
{
	pthread_mutex_unlock(&lock);
	return rc;
}

// covers returns 1 if [p, p+n) is in one allocation, 2 if it is in pinned memory, and otherwise 0.
static int covers(const void *q, size_t n)
{
	const uint8_t *p = q;
	for (struct block *b = blocks; b; b = b->next)
		if (p >= b->p && n <= b->n && (size_t)(p - b->p) <= b->n - n)
			return 1;
	for (struct pin *b = pins; b; b = b->next)
		if (p >= b->p && n <= b->n && (size_t)(p - b->p) <= b->n - n)
			return 2;
	return 0;
}

// is_readable reports whether a kernel may read [p, p+n). If the bytes are those of a chunk in pinned memory, it counts
// them. The range may cross memory that was pinned separately.
static int is_readable(const void *q, size_t n, int chunk)
{
	const uint8_t *p = q, *end = p + n;

	if (covers(p, n) == 1)
		return 1;
	while (p < end) {
		struct pin *b = pins;
		while (b && !(p >= b->p && p < b->p + b->n))
			b = b->next;
		if (b == NULL)
			return 0;
		p = b->p + b->n;
	}
	st.in_place += chunk ? (int64_t)n : 0;
	return 1;
}

static struct block *block_of(const void *q)
{
	for (struct block *b = blocks; b; b = b->next)
		if ((const uint8_t *)q >= b->p && (const uint8_t *)q < b->p + b->n)
			return b;
	return NULL;
}

static struct stream *stream_of(owcu_handle h)
{
	if (shared_stream.last == NULL)
		shared_stream.last = &shared_stream.first;
	return (uintptr_t)h < 16 ? &shared_stream : h;
}

static void run_ops(struct stream *s, struct event *until, int64_t at, int wait);

// check_stream checks work for a stream. If the work would join or wait for a capture, the capture is destroyed.
static int check_stream(owcu_handle h)
{
	int rc = stream_of(h)->capturing ? UNSUPPORTED : (uintptr_t)h < 16 && blocking_captures ? IMPLICIT : 0;

	if (rc)
		note_broken_rule("work for a stream that is being captured");
	return rc;
}
// enter_on_stream is like enter_queueing for a call that queues work on a stream.
static int enter_on_stream_as(const char *name, owcu_handle h)
{
	int rc = enter_queueing_as(name, 1);

	return rc ? rc : check_stream(h);
}
#define enter_on_stream(stream) enter_on_stream_as(__func__, stream)

// run_stream_kernel runs a kernel of bitstreams, such as ow_stream_open.
static void run_stream_kernel(const struct op *o)
{
	const ow_stream_head *head = o->few ? &o->few->head : (const void *)(uintptr_t)o->a;
	const ow_stream *s = (const void *)(head + 1);
	void *rows = (void *)(uintptr_t)o->b;
	uint32_t *status = (uint32_t *)(uintptr_t)o->status, n = (uint32_t)o->n;

	if (o->few ? head->streams > OW_STREAM_FEW : covers(head, sizeof *head + head->streams * sizeof *s) != 1) {
		note_broken_rule("a batch outside device memory");
		return;
	}
	int making = o->kernel == K_CUT || o->kernel == K_SUM || o->kernel == K_JOIN;
	for (uint32_t i = 0; i < head->streams; i++)
		if (making ? covers((void *)(uintptr_t)s[i].dst, s[i].stored) != 1 || (s[i].size && covers((void *)(uintptr_t)s[i].src, s[i].size) != 1)
		           : covers((void *)(uintptr_t)s[i].src, s[i].stored) != 1 ||
		    (o->kernel != K_PEEK && s[i].size && covers((void *)(uintptr_t)s[i].dst, s[i].size) != 1)) {
			note_broken_rule("a stream outside device memory");
			return;
		}
	if (o->kernel == K_OPEN)
		ow_stream_open_host(head, rows, n, status);
	else if (o->kernel == K_CLOSE)
		ow_stream_close_host(head, rows, n, status);
	else if (o->kernel == K_PEEK)
		ow_stream_peek_host(head, rows, n);
	else if (o->kernel == K_CUT)
		ow_stream_cut_host(head, rows, n);
	else if (o->kernel == K_SUM)
		ow_stream_sum_host(head, rows, n, status);
	else if (o->kernel == K_JOIN)
		ow_stream_join_host(head, rows, n, status);
	else
		ow_stream_x16_host(head, n, status);
}

// run_item_kernel runs a kernel that processes one item per warp.
static void run_item_kernel(const struct op *o)
{
	ow_batch_item *items = (void *)(uintptr_t)o->b;

	if (!covers(items, o->n * sizeof *items)) { // pinned memory is mapped
		note_broken_rule("items outside device memory");
		return;
	}
	for (size_t i = 0; i < o->n; i++)
		if (items[i].src_len && (covers((void *)(uintptr_t)items[i].src, items[i].src_len) != 1 ||
		                         (items[i].dst_cap && covers((void *)(uintptr_t)items[i].dst, items[i].dst_cap) != 1 + (o->kernel == K_HASH)))) {
			note_broken_rule("an item outside device memory");
			return;
		}
	static void (*const kernels[])(ow_batch_item *, uint32_t) = {ow_lz4_decode_host, ow_snappy_decode_host, ow_cascaded_decode_host, ow_x16_encode_host, ow_hash_sums_host};
	kernels[o->kernel - K_ITEMS](items, (uint32_t)o->n);
}

static void run_resident_kernel(const struct op *o); // fake_resident.h

static size_t cast_size(uint32_t t) { return t == OW_CAST_F32 ? 4 : t == OW_CAST_BF16 || t == OW_CAST_F16 ? 2 : 1; }

static void run_launch(const struct op *o)
{
	if (o->kernel < K_CRC && !is_readable((void *)(uintptr_t)o->b, o->n * 8, 0)) { // the table of segments or parts
		note_broken_rule("a table outside device memory");
		return;
	}
	if (o->kernel < OW_BYTES) {
		const ow_x16_seg *segs = (const void *)(uintptr_t)o->b;
		const ow_x16_chunk *chunks = (const void *)(uintptr_t)o->a;
		for (size_t i = 0; i < o->n; i++) {
			const ow_x16_chunk *c = &chunks[segs[i].chunk];
			if (!is_readable(c, sizeof *c, 0) || c->src % 16 || !is_readable((void *)(uintptr_t)c->src, c->stored, segs[i].seg == 0) ||
			    covers((void *)(uintptr_t)c->dst, c->logical) != 1) {
				note_broken_rule("a chunk outside device memory, or not aligned");
				return;
			}
		}
		ow_x16_host(o->kernel + 1, chunks, segs, (uint32_t)o->n, (uint32_t *)(uintptr_t)o->status);
	} else if (o->kernel == OW_BYTES) {
		const ow_move *moves = (const void *)(uintptr_t)o->a;
		const ow_part *parts = (const void *)(uintptr_t)o->b;
		for (size_t i = 0; i < o->n; i++) {
			const ow_move *m = &moves[parts[i].job];
			if (!is_readable(m, sizeof *m, 0) ||
			    !is_readable((void *)(uintptr_t)m->src, m->width + (m->rows - 1) * m->src_pitch, parts[i].part == 0) ||
			    covers((void *)(uintptr_t)m->dst, m->width + (m->rows - 1) * m->dst_pitch) != 1) {
				note_broken_rule("a move outside device memory");
				return;
			}
		}
		ow_move_host(moves, parts, (uint32_t)o->n);
	} else if (o->kernel >= K_RESIDENT) {
		run_resident_kernel(o);
	} else if (o->kernel >= K_ITEMS) {
		run_item_kernel(o);
	} else if (o->kernel >= K_OPEN) {
		run_stream_kernel(o);
	} else if (o->kernel == K_CRC) {
		const ow_crc_part *parts = (const void *)(uintptr_t)o->a;
		if (!is_readable(parts, o->n * sizeof *parts, 0) || !is_readable((void *)(uintptr_t)o->b, o->n * 4, 0)) {
			note_broken_rule("parts outside device memory");
			return;
		}
		for (size_t i = 0; i < o->n; i++)
			if (!is_readable((void *)(uintptr_t)parts[i].src, parts[i].bytes, 0)) {
				note_broken_rule("a part outside device memory");
				return;
			}
		ow_crc_host(parts, (uint32_t *)(uintptr_t)o->b, (uint32_t)o->n);
	} else {
		const ow_cast *casts = (const void *)(uintptr_t)o->a;
		const ow_part *parts = (const void *)(uintptr_t)o->b;
		for (size_t i = 0; i < o->n; i++) {
			const ow_cast *c = &casts[parts[i].job];
			size_t from = cast_size(c->from), to = cast_size(c->to);
			if (!is_readable(c, sizeof *c, 0) || c->src % from || c->dst % to ||
			    !is_readable((void *)(uintptr_t)c->src, c->n * from, parts[i].part == 0) || covers((void *)(uintptr_t)c->dst, c->n * to) != 1) {
				note_broken_rule("a cast outside device memory, or not aligned");
				return;
			}
		}
		ow_cast_host(casts, parts, (uint32_t)o->n);
	}
}

// streams holds all streams.
static struct stream *streams[256];

// is_record_queued reports whether a stream has not reached a record yet. A later record of the same event on another
// stream may be reached first. A destroyed stream has reached all records.
static int is_record_queued(const struct stream *s, const struct event *event, int64_t at)
{
	int i = 0;

	while (i < 256 && streams[i] != s)
		i++;
	if (i == 256 && s != &shared_stream)
		return 0;
	for (const struct op *o = s->first; o; o = o->next)
		if (o->kind == RECORD && o->event == event && o->at == at)
			return 1;
	return 0;
}

// run_op runs an operation and reports whether it has ended.
static int run_op(struct op *o, int wait)
{
	switch (o->kind) {
	case COPY:
		if (!covers(o->dst, o->n) && !covers(o->src, o->n))
			note_broken_rule("a copy between unknown addresses");
		else
			memcpy(o->dst, o->src, o->n);
		break;
	case FILL:
		memset(o->dst, o->value, o->n);
		break;
	case LAUNCH:
		run_launch(o);
		break;
	case RECORD:
		if (o->event->done < o->at) {
			struct timespec now;
			clock_gettime(CLOCK_MONOTONIC, &now);
			o->event->when = now.tv_sec * 1000000000LL + now.tv_nsec;
			o->event->done = o->at;
		}
		break;
	case WAIT:
		if (is_record_queued(o->recorder, o->event, o->at))
			run_ops(o->recorder, o->event, o->at, wait);
		return wait || !is_record_queued(o->recorder, o->event, o->at);
	case BUSY:
		st.waited += wait;
		return wait;
	}
	return 1;
}

// run_ops runs a stream's queued work, up to the record of `until` if this is not NULL. wait is set if a call waits for
// the work; otherwise operations that would wait stop the run.
static void run_ops(struct stream *s, struct event *until, int64_t at, int wait)
{
	if (s->running)
		return;
	s->running = 1;
	while (s->first && (!until || is_record_queued(s, until, at))) {
		struct op *o = s->first;
		if (!run_op(o, wait))
			break;
		s->first = o->next;
		if (s->first == NULL)
			s->last = &s->first;
		free((void *)o->few);
		free(o);
		st.pending--;
	}
	s->running = 0;
}

static void queue_op(owcu_handle h, struct op o)
{
	struct stream *s = stream_of(h);
	struct op *p = malloc(sizeof *p);
	*p = o;
	p->next = NULL;
	*s->last = p;
	s->last = &p->next;
	st.pending++;
}

// for_each_stream calls f for every stream.
static void for_each_stream(void (*f)(struct stream *s, void *arg), void *arg)
{
	f(stream_of(NULL), arg);
	for (int i = 0; i < 256; i++)
		if (streams[i])
			f(streams[i], arg);
}

static void run_stream(struct stream *s, void *arg)
{
	(void)arg;
	run_ops(s, NULL, 0, 0);
}

static void finish_stream(struct stream *s, void *arg)
{
	(void)arg;
	run_ops(s, NULL, 0, 1);
}
static void lose_device(void) { for_each_stream(finish_stream, NULL); }

// going describes memory that is about to be freed: whether queued work uses it, and whether there is work of
// owcu_fake_busy.
struct going {
	const uint8_t *p;
	size_t n;
	int used, busy;
};

static void note_uses(struct stream *s, void *arg)
{
	struct going *g = arg;

	for (struct op *o = s->first; o; o = o->next) {
		const uint8_t *at[] = {o->dst, o->src, (void *)(uintptr_t)o->a, (void *)(uintptr_t)o->b, (void *)(uintptr_t)o->status};
		for (int i = 0; i < 5; i++)
			g->used |= at[i] >= g->p && at[i] < g->p + g->n;
		g->busy |= o->kind == BUSY;
	}
}

// check_free checks the rules for a call that frees memory. It then runs queued work, as if time passed.
static void check_free(const void *p, size_t n)
{
	struct going g = {.p = p, .n = n};

	for_each_stream(note_uses, &g);
	if (g.used)
		note_broken_rule("memory was freed that queued work uses");
	st.waited += g.busy; // the driver may wait for all queued work in such a call
	for_each_stream(run_stream, NULL);
}

#endif
