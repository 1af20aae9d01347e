// Runs the host twins of the second module's kernels on the fake driver, after checking the memory that they use. Only
// fake.c includes this file.
#ifndef OWCU_FAKE_RESIDENT_H
#define OWCU_FAKE_RESIDENT_H

#include "fake_state.h"

#include "../../../../cuda/abi_delta.h"
#include "../../../../cuda/abi_digest.h"

typedef void run_digest_kernel(const ow_digest_job *jobs, uint32_t n, uint64_t tiles, const ow_digest_dim *dims, uint64_t *sums, uint32_t warps);
run_digest_kernel ow_digest_host, ow_digest_keyed_host;

// covers_digest reports whether a digest's tensor is entirely in device memory.
static int covers_digest(const ow_digest_job *j, const ow_digest_dim *d)
{
	uint64_t low = j->src, bytes = j->rank ? j->item : j->bytes;

	if (j->rank == 0 && (j->src % j->item || (j->item != 8 && j->item != 16)))
		return 0;
	for (int i = 0; i < j->rank; i++) {
		uint64_t reach = (d[i].size - 1) * (uint64_t)(d[i].stride < 0 ? -d[i].stride : d[i].stride);
		if (d[i].size == 0 || d[i].stride % j->item)
			return 0;
		low -= d[i].stride < 0 ? reach : 0;
		bytes += reach;
	}
	return covers((void *)(uintptr_t)low, bytes) == 1;
}

static void run_digest(const struct op *o)
{
	const ow_digest_job *jobs = (const void *)(uintptr_t)o->a;
	const ow_digest_dim *dims = (const void *)(uintptr_t)o->args[1];
	uint64_t *sums = (void *)(uintptr_t)o->b;
	int key = o->kernel == K_DIGEST_KEYED ? OW_DIGEST_KEY : 0;

	if (covers(jobs, o->n * sizeof *jobs) != 1 || covers(sums - key, o->n * 16 + key * 8) != 1) {
		note_broken_rule("a table outside device memory");
		return;
	}
	for (size_t i = 0; i < o->n; i++)
		if (!covers_digest(&jobs[i], dims + jobs[i].dims)) {
			note_broken_rule("a tensor outside device memory");
			return;
		}
	(key ? ow_digest_keyed_host : ow_digest_host)(jobs, (uint32_t)o->n, o->args[0], dims, sums, o->warps);
}

void ow_delta_apply_host(const ow_delta_row *rows, uint32_t n);
void ow_delta_measure_host(ow_delta_row *rows, uint32_t n);
void ow_delta_write_host(const ow_delta_row *rows, uint32_t n);

static void run_delta(const struct op *o)
{
	ow_delta_row *rows = (void *)(uintptr_t)o->a;

	if (covers(rows, o->n * sizeof *rows) != 1) {
		note_broken_rule("a table outside device memory");
		return;
	}
	for (size_t i = 0; i < o->n; i++) {
		const ow_delta_row *r = &rows[i];
		if (r->bytes == 0 || r->lg > 3 || covers((void *)(uintptr_t)r->now, r->bytes) != 1 ||
		    (o->kernel != K_DELTA_APPLY && covers((void *)(uintptr_t)r->base, r->bytes) != 1) ||
		    (o->kernel != K_DELTA_MEASURE && (r->at % 4 || covers((void *)(uintptr_t)r->at, r->stored) != 1))) {
			note_broken_rule("a chunk outside device memory");
			return;
		}
	}
	if (o->kernel == K_DELTA_APPLY)
		ow_delta_apply_host(rows, (uint32_t)o->n);
	else if (o->kernel == K_DELTA_MEASURE)
		ow_delta_measure_host(rows, (uint32_t)o->n);
	else
		ow_delta_write_host(rows, (uint32_t)o->n);
}

static void run_resident_kernel(const struct op *o)
{
	if (o->kernel == K_DIGEST || o->kernel == K_DIGEST_KEYED)
		run_digest(o);
	else
		run_delta(o);
}

static int queue_resident_launch(int kernel, unsigned grid, unsigned block, int flat, owcu_handle s, void **args)
{
	struct op o = {.kind = LAUNCH, .kernel = kernel, .warps = grid * (block / 32)};
	uint32_t n;

	if (!flat || grid == 0 || block != OW_DIGEST_THREADS) {
		note_broken_rule("a launch with a wrong shape");
		return INVALID;
	}
	memcpy(&o.a, args[0], 8);
	memcpy(&n, args[1], 4);
	memcpy(&o.args[0], args[2], 8);
	memcpy(&o.args[1], args[3], 8);
	memcpy(&o.b, args[4], 8);
	o.n = n;
	queue_op(s, o);
	return 0;
}

#endif
