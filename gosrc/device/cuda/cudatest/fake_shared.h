// Shares memory of the fake driver between processes. Only fake.c includes this file.
#ifndef OWCU_FAKE_SHARED_H
#define OWCU_FAKE_SHARED_H

#include "fake_state.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

// mapped_size returns the size of a block of n bytes: whole pages, with a guard zone on both sides.
static size_t mapped_size(size_t n) { return (n + 3 * GUARD - 1) / GUARD * GUARD; }
// shared_memory is the contents of a memory handle.
struct shared_memory {
	int pid, file;
	uint64_t n;
};
static int f_ipc_get(struct owcu_ipc *handle, owcu_ptr p)
{
	int rc = enter_call(1);
	struct block *b = rc ? NULL : block_of((void *)(uintptr_t)p);
	if (rc || b == NULL || (b->shared && b->file < 0))
		return leave_call(rc ? rc : INVALID);
	if (!b->shared) { // move the bytes to a file mapped at the same address
		size_t n = mapped_size(b->n);
		int file = memfd_create("overwire-fake", MFD_CLOEXEC);
		if (file < 0 || write(file, b->raw, n) != (ssize_t)n || mmap(b->raw, n, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_SHARED, file, 0) == MAP_FAILED)
			return leave_call(OOM);
		b->shared = n;
		b->file = file;
	}
	struct shared_memory m = {getpid(), b->file, b->n};
	memset(handle, 0, sizeof *handle);
	memcpy(handle, &m, sizeof m);
	return leave_call(0);
}
static int f_ipc_open(owcu_ptr *p, struct owcu_ipc handle, unsigned flags)
{
	int rc = enter_call(1);
	struct shared_memory m;
	char path[64];
	memcpy(&m, &handle, sizeof m);
	if (rc || flags != 1 || m.pid == getpid()) // only memory of other processes can be mapped
		return leave_call(rc ? rc : INVALID_CONTEXT);
	snprintf(path, sizeof path, "/proc/%d/fd/%d", m.pid, m.file);
	int file = open(path, O_RDWR | O_CLOEXEC);
	if (file < 0)
		return leave_call(INVALID_HANDLE);
	uint8_t *raw = mmap(NULL, mapped_size(m.n), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	close(file);
	if (raw == MAP_FAILED)
		return leave_call(INVALID_HANDLE);
	struct block *b = malloc(sizeof *b);
	*b = (struct block){blocks, raw, raw + GUARD, m.n, (int)((int *)current - contexts_mark), mapped_size(m.n), -1};
	blocks = b;
	st.attached++;
	*p = (owcu_ptr)(uintptr_t)b->p;
	return leave_call(0);
}
static int f_ipc_close(owcu_ptr p)
{
	int rc = enter_call(1);
	if (refuses_free(&rc))
		return leave_call(rc);
	for (struct block **at = &blocks; *at; at = &(*at)->next) {
		struct block *b = *at;
		if ((owcu_ptr)(uintptr_t)b->p != p || !b->shared || b->file >= 0)
			continue;
		check_free(b->p, b->n);
		*at = b->next;
		munmap(b->raw, b->shared);
		free(b);
		st.attached--;
		return leave_call(rc);
	}
	note_broken_rule("memory was unmapped that was not mapped");
	return leave_call(INVALID);
}
#endif
