// Creates tensors in C memory, in one allocation each. Releasing the last reference frees a tensor, on any
// thread, without Go or Python. A forked child frees nothing: it shares the pages with its parent and must be
// able to exit without using the engine.
#include "managed.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

static volatile int forked;

static void in_child(void) { forked = 1; }

static int watched;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static void watch(void) { watched = pthread_atfork(NULL, NULL, in_child); }

int ow_fork_watch(void)
{
	pthread_once(&once, watch);
	return watched;
}

int ow_fork_flag(void) { return forked; }

static void push_listed(struct ow_listed *l)
{
	l->next = __atomic_load_n(l->list, __ATOMIC_RELAXED);
	while (!__atomic_compare_exchange_n(l->list, &l->next, l, 1, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
		;
}

void ow_block_release(struct ow_block *block, void *data, int64_t n)
{
	// Keep in sync with Memory.Release and ReturnPages of package device.
	const uintptr_t page = 4096, least = 64 << 10;

	if (block == NULL || forked)
		return;
	if (block->kind == OW_KIND_REGION) {
		uintptr_t lo = ((uintptr_t)data + page - 1) & ~(page - 1);
		uintptr_t hi = ((uintptr_t)data + (uintptr_t)n) & ~(page - 1);
		if (hi > lo && hi - lo >= least)
			madvise((void *)lo, hi - lo, MADV_DONTNEED);
	}
	// Release, so that writes through the tensor finish before the unmap. Acquire, so that the unmap comes after the
	// writes of other holders.
	if (__atomic_sub_fetch(&block->refs, 1, __ATOMIC_ACQ_REL) == 0) {
		struct ow_listed *l = (struct ow_listed *)block;
		if (block->kind == OW_KIND_CUDA) { // queued work may still use it, so only put it on the list
			push_listed(l);
			return;
		}
		void *base = block->base; // the block is in the memory to be unmapped
		int64_t length = (int64_t)block->length;
		if (block->kind == OW_KIND_ARENA) {
			int64_t *room = &((struct ow_free_list *)l->list)->room;
			if (__atomic_sub_fetch(room, length, __ATOMIC_RELAXED) >= 0) {
				push_listed(l);
				return;
			}
			__atomic_add_fetch(room, length, __ATOMIC_RELAXED);
		}
		munmap(base, (size_t)length);
	}
}

// whole is a managed tensor and the data that follows it in the same allocation.
struct whole {
	struct ow_managed m;
	int64_t bytes;
	int64_t dims[]; // shape, then strides
};

static void deleter(struct ow_managed *m)
{
	if (forked)
		return;
	struct whole *w = (struct whole *)m;
	ow_block_release(m->context, m->t.data, w->bytes);
	free(w);
}

static struct ow_managed *managed(const struct ow_wanted *of, const int64_t *shape)
{
	int32_t ndim = of->ndim, cuda = of->cuda;
	struct whole *w = malloc(sizeof *w + 2 * sizeof(int64_t) * (size_t)ndim);
	if (w == NULL)
		return NULL;
	int64_t *strides = w->dims + ndim;
	uint64_t step = 1; // unsigned, because a tensor without elements may have huge other dimensions
	for (int32_t i = ndim - 1; i >= 0; i--) {
		w->dims[i] = shape[i];
		strides[i] = (int64_t)step;
		step *= shape[i] > 0 ? (uint64_t)shape[i] : 1;
	}
	w->bytes = of->bytes;
	w->m = (struct ow_managed){
		.t = {.data = (void *)(uintptr_t)of->data, .device = {cuda > 0 ? 2 : 1, cuda > 0 ? cuda - 1 : 0}, .ndim = ndim,
		      .type = of->type, .shape = w->dims, .strides = strides},
		.context = (void *)(uintptr_t)of->block,
		.deleter = deleter,
	};
	return &w->m;
}

void ow_managed_forget(uint64_t managed) { free((void *)(uintptr_t)managed); }

int64_t ow_managed_many(struct ow_wanted *all, int64_t n, const int64_t *dims)
{
	for (int64_t i = 0; i < n; i++) {
		struct ow_managed *m = managed(&all[i], dims);
		if (m == NULL)
			return i;
		all[i].managed = (uint64_t)(uintptr_t)m;
		dims += all[i].ndim;
	}
	return n;
}

void ow_managed_delete(void *m) { ((struct ow_managed *)m)->deleter(m); }
