//go:build owfake

#define _GNU_SOURCE // memfd_create
#include "fake.h"
#include "fake_state.h"
#include "fake_resident.h"
#include "fake_shared.h"
#include "../driver/context.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static int f_init(unsigned flags)
{
	int rc = enter_queueing(0);
	(void)flags;
	if (rc == NOT_INITIALIZED)
		rc = devices ? 0 : 100;
	if (rc == 0)
		initialized = 1;
	return leave_call(rc);
}
static int f_driver_version(int *v)
{
	int rc = enter_queueing(0);
	*v = version;
	return leave_call(rc);
}
static int f_device_count(int *n)
{
	int rc = enter_queueing(0);
	*n = devices;
	return leave_call(rc);
}
static int f_device_get(int *d, int i)
{
	int rc = enter_queueing(0);
	*d = i;
	return leave_call(rc ? rc : i < 0 || i >= devices ? 101 : 0);
}
static int f_device_name(char *s, int n, int d)
{
	int rc = enter_queueing(0);
	snprintf(s, (size_t)n, "Fake GPU %d", d);
	return leave_call(rc);
}
static int f_device_attribute(int *v, int a, int d)
{
	int rc = enter_queueing(0);
	*v = a == 75 ? 9 : a == 76 ? 0 : a == 100 ? d == 1 : 132; // device 1 has a coherent link
	return leave_call(rc);
}
static int f_device_memory(size_t *n, int d)
{
	int rc = enter_queueing(0);
	(void)d;
	*n = total;
	return leave_call(rc);
}
static int f_device_bus(char *s, int n, int d)
{
	int rc = enter_queueing(0);
	snprintf(s, (size_t)n, "FFFF:%02X:00.0", d);
	return leave_call(rc);
}
static int f_ctx_retain(owcu_handle *c, int d)
{
	int rc = enter_call(0);
	if (rc == 0) {
		*c = &contexts_mark[d];
		st.contexts++;
	}
	return leave_call(rc);
}
static int f_ctx_release(int d)
{
	int rc = enter_call(0);
	(void)d;
	st.contexts--;
	return leave_call(rc);
}
static int refused_contexts; // number of next f_ctx_get calls that fail
static int f_ctx_get(owcu_handle *c)
{
	int rc = enter_queueing(0);
	if (rc == 0 && refused_contexts > 0) {
		refused_contexts--;
		rc = INVALID_CONTEXT;
	}
	*c = current;
	return leave_call(rc);
}
void owcu_fake_refuse_context(int times)
{
	pthread_mutex_lock(&lock);
	refused_contexts = times;
	pthread_mutex_unlock(&lock);
}
static int f_ctx_set(owcu_handle c)
{
	int rc = enter_queueing(0);
	// Restoring NULL is part of the cleanup, so it must work after an error.
	if (rc == 0 || c == NULL)
		current = c;
	return leave_call(rc);
}
static int f_thread_mode(int *mode)
{
	int rc = enter_queueing(0), before = capture_mode;
	if (refuses_free(&rc))
		return leave_call(rc);
	st.relaxed += (*mode == RELAXED) - (before == RELAXED);
	capture_mode = *mode;
	*mode = before;
	return leave_call(0); // the mode belongs to the thread, not to the device
}
static int f_stream_capturing(owcu_handle s, int *status)
{
	int rc = enter_queueing(1);
	*status = stream_of(s)->capturing;
	return leave_call(rc ? rc : (uintptr_t)s < 16 && blocking_captures ? IMPLICIT : 0);
}
static int f_mem_alloc(owcu_ptr *p, size_t n)
{
	int rc = enter_call(1);
	if (rc)
		return leave_call(rc);
	if (n == 0)
		return leave_call(INVALID);
	if (st.bytes + n > total)
		return leave_call(OOM);
	struct block *b = malloc(sizeof *b);
	b->raw = aligned_alloc(GUARD, mapped_size(n));
	b->p = b->raw + GUARD;
	b->n = n;
	b->shared = 0;
	b->device = (int)((int *)current - contexts_mark);
	memset(b->raw, 0xa5, n + 2 * GUARD);
	b->next = blocks;
	blocks = b;
	st.blocks++;
	st.bytes += (int64_t)n;
	*p = (owcu_ptr)(uintptr_t)b->p;
	return leave_call(0);
}
static int f_mem_free(owcu_ptr p)
{
	int rc = enter_call(1);
	if (refuses_free(&rc))
		return leave_call(rc);
	for (struct block **at = &blocks; *at; at = &(*at)->next) {
		struct block *b = *at;
		if ((owcu_ptr)(uintptr_t)b->p != p || (b->shared && b->file < 0))
			continue;
		for (int i = 0; i < GUARD; i++)
			if (b->raw[i] != 0xa5 || b->p[b->n + (size_t)i] != 0xa5) {
				note_broken_rule("a guard zone was overwritten");
				break;
			}
		check_free(b->p, b->n);
		memset(b->p, 0xdd, b->n);
		*at = b->next;
		st.blocks--;
		st.bytes -= (int64_t)b->n;
		if (b->shared) { // make it heap memory again
			close(b->file);
			mmap(b->raw, b->shared, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		}
		free(b->raw);
		free(b);
		return leave_call(rc);
	}
	note_broken_rule("memory was freed that was not allocated");
	return leave_call(INVALID);
}
static int f_mem_info(size_t *unused, size_t *all)
{
	int rc = enter_call(1);
	*all = total;
	*unused = total - (size_t)st.bytes;
	return leave_call(rc);
}
static int f_host_register(void *p, size_t n, unsigned flags)
{
	int rc = enter_call(1);
	(void)flags;
	if (rc)
		return leave_call(rc);
	struct pin *b = malloc(sizeof *b);
	*b = (struct pin){pins, p, n};
	pins = b;
	st.pins++;
	return leave_call(0);
}
static int f_host_unregister(void *p)
{
	int rc = enter_call(1);
	if (refuses_free(&rc))
		return leave_call(rc);
	for (struct pin **at = &pins; *at; at = &(*at)->next)
		if ((*at)->p == p) {
			struct pin *b = *at;
			check_free(b->p, b->n);
			*at = b->next;
			free(b);
			st.pins--;
			return leave_call(rc);
		}
	note_broken_rule("memory was unregistered that was not registered");
	return leave_call(INVALID);
}
static int f_host_pointer(owcu_ptr *p, void *host, unsigned flags)
{
	int rc = enter_queueing(1);
	(void)flags;
	*p = (owcu_ptr)(uintptr_t)host;
	return leave_call(rc);
}
static int f_copy_in(owcu_ptr dst, const void *src, size_t n, owcu_handle s)
{
	int rc = enter_on_stream(s);
	if (rc == 0 && covers((void *)(uintptr_t)dst, n) != 1) {
		note_broken_rule("a copy outside device memory");
		rc = INVALID;
	}
	if (rc == 0 && covers(src, n) != 2) {
		note_broken_rule("a copy from memory that is not pinned");
		rc = INVALID;
	}
	if (rc == 0)
		queue_op(s, (struct op){.kind = COPY, .dst = (void *)(uintptr_t)dst, .src = src, .n = n});
	return leave_call(rc);
}
static int f_copy_out_async(void *dst, owcu_ptr src, size_t n, owcu_handle s)
{
	int rc = enter_on_stream(s);
	if (rc == 0)
		queue_op(s, (struct op){.kind = COPY, .dst = dst, .src = (void *)(uintptr_t)src, .n = n});
	return leave_call(rc);
}
static int f_copy_any(owcu_ptr dst, owcu_ptr src, size_t n, owcu_handle s)
{
	int rc = enter_on_stream(s);
	// Like the real driver, read memory that is not pinned before the call returns.
	if (rc == 0 && covers((void *)(uintptr_t)src, n) == 0) {
		run_ops(stream_of(s), NULL, 0, 1);
		memcpy((void *)(uintptr_t)dst, (void *)(uintptr_t)src, n);
	} else if (rc == 0) {
		queue_op(s, (struct op){.kind = COPY, .dst = (void *)(uintptr_t)dst, .src = (void *)(uintptr_t)src, .n = n});
		if (covers((void *)(uintptr_t)dst, n) == 0)
			run_ops(stream_of(s), NULL, 0, 1);
	}
	return leave_call(rc);
}
static int f_pointer_attribute(void *value, int attribute, owcu_ptr p)
{
	int rc = enter_queueing(0);
	struct block *b = rc == 0 && attribute == 9 ? block_of((void *)(uintptr_t)p) : NULL;
	if (rc == 0 && b == NULL)
		rc = INVALID;
	if (rc == 0)
		*(int *)value = b->device;
	return leave_call(rc);
}
static int f_stream_ctx(owcu_handle s, owcu_handle *ctx)
{
	int rc = enter_queueing(1);
	struct stream *t = stream_of(s);
	*ctx = t->ctx != NULL ? t->ctx : current;
	return leave_call(rc);
}
static int f_stream_create(owcu_handle *s, unsigned flags)
{
	int rc = enter_call(1);
	(void)flags;
	if (rc)
		return leave_call(rc);
	struct stream *t = calloc(1, sizeof *t);
	t->last = &t->first;
	t->ctx = current;
	for (int i = 0; i < 256; i++)
		if (streams[i] == NULL) {
			streams[i] = t;
			break;
		}
	st.streams++;
	*s = t;
	return leave_call(0);
}
static int f_stream_destroy(owcu_handle s)
{
	int rc = enter_call(1);
	rc = rc ? rc : check_stream(s);
	if (refuses_free(&rc))
		return leave_call(rc);
	run_ops(s, NULL, 0, 1); // unlike the real driver, because the work would never run later
	for (int i = 0; i < 256; i++)
		if (streams[i] == s)
			streams[i] = NULL;
	free(s);
	st.streams--;
	return leave_call(rc);
}
static int f_stream_sync(owcu_handle s)
{
	int rc = enter_call(1);
	rc = rc ? rc : check_stream(s);
	run_ops(stream_of(s), NULL, 0, 1);
	return leave_call(rc);
}
static int f_stream_wait(owcu_handle s, owcu_handle e, unsigned flags)
{
	int rc = enter_on_stream(s);
	struct event *ev = e;
	(void)flags;
	// A wait for an event that was never recorded returns immediately.
	if (rc == 0 && ev->recorded)
		queue_op(s, (struct op){.kind = WAIT, .event = ev, .recorder = ev->stream, .at = ev->recorded});
	return leave_call(rc);
}
static int f_event_create(owcu_handle *e, unsigned flags)
{
	int rc = enter_call(1);
	if (rc)
		return leave_call(rc);
	struct event *ev = calloc(1, sizeof *ev);
	ev->untimed = flags & 2; // CU_EVENT_DISABLE_TIMING
	*e = ev;
	st.events++;
	return leave_call(0);
}
static int f_event_record(owcu_handle e, owcu_handle s)
{
	int rc = enter_on_stream(s);
	struct event *ev = e;
	if (rc == 0) {
		ev->stream = stream_of(s);
		queue_op(s, (struct op){.kind = RECORD, .event = ev, .at = ++ev->recorded});
	}
	return leave_call(rc);
}
static int f_event_query(owcu_handle e)
{
	int rc = enter_call(1);
	struct event *ev = e;
	int ready = ev->done >= ev->recorded;
	if (rc == 0 && !ready) // not ready: run queued work, as if time passed
		run_ops(ev->stream, ev, ev->recorded, 0);
	return leave_call(rc ? rc : ready ? 0 : OWCU_NOT_READY);
}
static int f_event_sync(owcu_handle e)
{
	int rc = enter_call(1);
	struct event *ev = e;
	if (rc == 0 && ev->done < ev->recorded)
		run_ops(ev->stream, ev, ev->recorded, 1);
	return leave_call(rc);
}
static int f_event_elapsed(float *ms, owcu_handle b, owcu_handle a)
{
	int rc = enter_call(1);
	struct event *from = b, *to = a;
	if (rc == 0 && (from->untimed || to->untimed || !from->recorded || !to->recorded)) {
		note_broken_rule("event_elapsed for events without times");
		rc = INVALID_HANDLE;
	}
	if (rc == 0 && (from->done < from->recorded || to->done < to->recorded))
		rc = OWCU_NOT_READY;
	*ms = rc ? 0 : (float)((double)(to->when - from->when) / 1e6);
	return leave_call(rc);
}
static int f_event_destroy(owcu_handle e)
{
	int rc = enter_call(1);
	struct event *ev = e;
	if (refuses_free(&rc))
		return leave_call(rc);
	ev->next = ended; // queued work may still refer to it
	ended = ev;
	for_each_stream(run_stream, NULL);
	st.events--;
	return leave_call(rc);
}

static const char *const kernel_names[] = {"ow_x16_bf16", "ow_x16_fp16",    "ow_x16_fp32",  "ow_x16_e4m3",    "ow_x16_e5m2",
                                           "ow_x16_int8", "ow_x16_nibbles", "ow_x16_bytes", "ow_move_kernel", "ow_cast_kernel", "ow_crc",
                                           "ow_stream_open", "ow_stream_close", "ow_stream_peek", "ow_stream_x16",
                                           "ow_stream_cut",  "ow_stream_sum", "ow_stream_join",
                                           "ow_lz4_decode",  "ow_snappy_decode", "ow_cascaded_decode", "ow_x16_encode", "ow_hash_sums",
                                           "ow_digest", "ow_digest_keyed", "ow_delta_apply", "ow_delta_measure", "ow_delta_write"};

static int f_module_load(owcu_handle *m, const void *image)
{
	int rc = enter_call(1);
	uint32_t magic;
	if (rc)
		return leave_call(rc);
	memcpy(&magic, image, 4);
	if (magic != 0xba55ed50)
		return leave_call(200); // CUDA_ERROR_INVALID_IMAGE
	*m = malloc(1);
	st.modules++;
	return leave_call(0);
}
static int f_module_unload(owcu_handle m)
{
	int rc = enter_call(1);
	if (refuses_free(&rc))
		return leave_call(rc);
	free(m);
	st.modules--;
	return leave_call(rc);
}
static int f_module_function(owcu_handle *f, owcu_handle m, const char *name)
{
	int rc = enter_queueing(1);
	(void)m;
	if (rc)
		return leave_call(rc);
	for (size_t i = 0; i < sizeof kernel_names / sizeof *kernel_names; i++)
		if (strcmp(name, kernel_names[i]) == 0) {
			*f = (owcu_handle)(i + 1);
			return leave_call(0);
		}
	return leave_call(500); // CUDA_ERROR_NOT_FOUND
}
static int f_launch(owcu_handle f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                    unsigned shared, owcu_handle s, void **args, void **extra)
{
	int rc = enter_on_stream(s);
	int kernel = (int)(uintptr_t)f - 1;
	uint32_t n;
	(void)extra;
	if (rc)
		return leave_call(rc);
	if (kernel >= K_RESIDENT)
		return leave_call(queue_resident_launch(kernel, gx, bx, gy * gz * by * bz == 1 && shared == 0, s, args));
	if (kernel >= K_ITEMS) { // kernel(items, n)
		struct op o = {.kind = LAUNCH, .kernel = kernel};
		memcpy(&o.b, args[0], 8);
		memcpy(&n, args[1], 4);
		o.n = n;
		if (n == 0 || gx != ow_batch_blocks(kernel >= K_ENCODE ? 1 : OW_BATCH_WARPS, n) || gy != 1 || gz != 1 || (bx != OW_BATCH_THREADS && kernel < K_ENCODE) || bx % 32 || bx > OW_BATCH_MOST || by != 1 || bz != 1 || shared != 0) {
			note_broken_rule("a launch with a wrong shape");
			return leave_call(INVALID);
		}
		queue_op(s, o);
		return leave_call(0);
	}
	memcpy(&n, args[2], 4);
	unsigned per = kernel == K_OPEN || kernel == K_CLOSE || kernel == K_PEEK || kernel == K_CUT ? 32 * OW_X16_WARPS : OW_X16_WARPS;
	int loads = n == 0 && kernel < K_OPEN; // owcu_load_kernels
	if ((n == 0 && !loads) || gx != (loads ? 1 : (n + per - 1) / per) || gy != 1 || gz != 1 || bx != 32 * OW_X16_WARPS || by != 1 ||
	    bz != 1 || shared != (kernel < OW_BYTES ? OW_X16_SHARED : kernel == K_X16 ? OW_STREAM_SHARED : 0)) {
		note_broken_rule("a launch with a wrong shape");
		return leave_call(INVALID);
	}
	if (loads)
		return leave_call(0);
	struct op o = {.kind = LAUNCH, .kernel = kernel, .n = n};
	memcpy(&o.a, args[0], 8);
	memcpy(&o.b, args[1], 8);
	memcpy(&o.status, args[3], 8);
	if (kernel == K_X16 && o.a == 0) {
		ow_stream_few *few = malloc(sizeof *few);
		memcpy(few, args[4], sizeof *few);
		o.few = few;
	}
	queue_op(s, o);
	return leave_call(0);
}
static int f_error_name(owcu_result r, const char **s)
{
	*s = r == OOM ? "CUDA_ERROR_OUT_OF_MEMORY" : r == 999 ? "CUDA_ERROR_UNKNOWN" : r == UNSUPPORTED ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" : "CUDA_ERROR_FAKE";
	return 0;
}
static int f_error_text(owcu_result r, const char **s)
{
	*s = r == OOM ? "out of memory" : "the fake driver fails on request";
	return 0;
}

const struct owcu_api *owcu_fake_api(void)
{
	static const struct owcu_api api = {
#define OWCU_FAKE(field, symbol, args) .field = f_##field,
	    OWCU_FUNCTIONS(OWCU_FAKE)
#undef OWCU_FAKE
	};
	return &api;
}

void owcu_fake_reset(uint64_t memory)
{
	pthread_mutex_lock(&lock);
	st.calls = st.broken = st.waited = st.in_place = 0;
	st.what[0] = 0;
	fail_in = 0;
	lost = 0;
	total = memory;
	version = 13000;
	devices = 2;
	pthread_mutex_unlock(&lock);
}
void owcu_fake_fail(int64_t nth, int code, int sticky)
{
	pthread_mutex_lock(&lock);
	fail_in = nth;
	fail_code = code;
	fail_sticky = sticky;
	lost = 0;
	pthread_mutex_unlock(&lock);
}
void owcu_fake_get(struct owcu_fake_state *s)
{
	pthread_mutex_lock(&lock);
	*s = st;
	pthread_mutex_unlock(&lock);
}
void owcu_fake_version(int v, int n)
{
	pthread_mutex_lock(&lock);
	version = v;
	devices = n;
	initialized = 0;
	pthread_mutex_unlock(&lock);
}

void owcu_fake_capture(uint64_t stream, int blocking, int on)
{
	pthread_mutex_lock(&lock);
	captures += on ? 1 : -1;
	if (blocking)
		blocking_captures += on ? 1 : -1;
	if (stream)
		stream_of((owcu_handle)(uintptr_t)stream)->capturing = on;
	pthread_mutex_unlock(&lock);
}

void owcu_fake_busy(uint64_t stream)
{
	pthread_mutex_lock(&lock);
	queue_op((owcu_handle)(uintptr_t)stream, (struct op){.kind = BUSY});
	pthread_mutex_unlock(&lock);
}

static void finish_busy(struct stream *s, void *arg)
{
	(void)arg;
	for (struct op *o = s->first; o; o = o->next)
		if (o->kind == BUSY)
			*o = (struct op){.next = o->next, .kind = FILL}; // zero bytes
}
int owcu_fake_idle(void)
{
	pthread_mutex_lock(&lock);
	for_each_stream(finish_busy, NULL);
	for_each_stream(run_stream, NULL);
	return leave_call(0);
}

void owcu_fake_fill(owcu_ptr p, int v, uint64_t n, uint64_t stream)
{
	pthread_mutex_lock(&lock);
	queue_op((owcu_handle)(uintptr_t)stream, (struct op){.kind = FILL, .dst = (void *)(uintptr_t)p, .value = v, .n = n});
	pthread_mutex_unlock(&lock);
}

int owcu_fake_fork(owcu_handle ctx)
{
	int status = -1;
	pid_t child = fork();

	if (child == 0) {
		struct owcu_error e = {0}, f = {0};
		uint64_t n = 4096;
		owcu_ptr p = 0;
		int64_t before = st.calls;
		int good = owcu_forked() && owcu_alloc(ctx, 1, &n, &p, &e) != 0 && e.code == OWCU_FORKED &&
		           owcu_free(ctx, 1, &p, &f) != 0 && f.code == OWCU_FORKED && st.calls == before;
		_exit(good ? 0 : 1);
	}
	if (child > 0)
		waitpid(child, &status, 0);
	return status;
}
