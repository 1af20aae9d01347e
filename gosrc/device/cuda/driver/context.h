// Bundles several driver calls into one cgo call.
//
// Every function makes the device's context current while it runs and then restores the previous one, because it may
// run on a Python thread where torch has selected a device. Meanwhile the thread's mode of stream capture is relaxed,
// so that no call destroys a graph capture of this or another thread. After an error the remaining calls are skipped,
// and e says which call failed and why.
#ifndef OWCU_CONTEXT_H
#define OWCU_CONTEXT_H

#include "driver.h"

struct owcu_error {
	const char *call; // NULL means no error
	int code;
	char text[120]; // the driver's name and description of the code
};

struct owcu_info {
	char name[128], bus[32];
	int major, minor, sms, coherent;
	uint64_t memory;
};

int owcu_init_driver(int *version, int *count, struct owcu_error *e);
int owcu_get_device_info(int ordinal, struct owcu_info *info, struct owcu_error *e);
// owcu_ctx_open also returns the two values of owcu_info that a load needs: coherent and sms.
int owcu_ctx_open(int ordinal, int *device, owcu_handle *ctx, int *coherent, int *sms, struct owcu_error *e);
int owcu_ctx_close(int device, struct owcu_error *e);

// owcu_guard saves the thread state that owcu_enter changes.
struct owcu_guard {
	owcu_handle before, ctx;
	int mode;
};

// owcu_enter makes the context current on this thread and its capture mode relaxed, for calls to other libraries.
// owcu_leave restores both. If owcu_enter fails, there is nothing to restore.
int owcu_enter(struct owcu_guard *g, owcu_handle ctx, struct owcu_error *e);
void owcu_leave(struct owcu_guard *g);

// owcu_alloc allocates all n pieces or none. After an error, out holds the pieces that the driver could not free,
// which the caller must free later with owcu_free, and 0 elsewhere.
int owcu_alloc(owcu_handle ctx, int64_t n, const uint64_t *sizes, owcu_ptr *out, struct owcu_error *e);
// owcu_free frees n pieces that no work uses, and writes 0 for those that were freed. It continues after an error
// and reports the first one. On a lost device, all pieces count as freed.
int owcu_free(owcu_handle ctx, int64_t n, owcu_ptr *p, struct owcu_error *e);
// owcu_try_record_events records an event on each of n streams, and makes missing events. If one of the streams
// is being captured it returns 1, and the events are meaningless.
int owcu_try_record_events(owcu_handle ctx, int n, const uint64_t *streams, owcu_handle *events, struct owcu_error *e);
// owcu_events_passed returns 1 if all work before the events has ended, otherwise 0. It does not wait.
int owcu_events_passed(owcu_handle ctx, int n, const owcu_handle *events, struct owcu_error *e);
// owcu_register pins [p, p+n) for every context of the process.
int owcu_register(owcu_handle ctx, void *p, uint64_t n, struct owcu_error *e);
// owcu_try_release frees an unused object, unless it is NULL. It returns 1 if the driver failed but may succeed next
// time. On a lost device the object counts as freed.
enum { OWCU_EVENT, OWCU_STREAM, OWCU_PINNED /* owcu_register */, OWCU_ATTACHED /* owcu_map_ipc */ };
int owcu_try_release(owcu_handle ctx, int what, void *thing, struct owcu_error *e);
int owcu_memory_info(owcu_handle ctx, uint64_t *unused, uint64_t *total, struct owcu_error *e);
// owcu_copy_to_host copies on *stream, which the first call makes.
int owcu_copy_to_host(owcu_handle ctx, owcu_handle *stream, void *dst, owcu_ptr src, uint64_t n, struct owcu_error *e);

// owcu_module_open loads an image, of which it keeps a copy until the module is closed, and looks up kernels by their
// names, which are separated by NUL. m must be zero the first time. After an error the module may be opened again.
// owcu_module_close returns 1 if the driver failed but may succeed next time.
struct owcu_module {
	owcu_handle module;
	void *image;
};
int owcu_module_open(owcu_handle ctx, const void *image, uint64_t n, const char *names, int count, struct owcu_module *m,
                     owcu_handle *kernels, struct owcu_error *e);
int owcu_module_close(owcu_handle ctx, struct owcu_module *m, struct owcu_error *e);

// owcu_stream_follow_event makes a stream wait for the last record of an event.
int owcu_stream_follow_event(owcu_handle ctx, owcu_handle event, uint64_t stream, struct owcu_error *e);

// owcu_arena is pinned host memory, device memory, streams and events.
struct owcu_arena {
	void *host;      // registered
	owcu_ptr mapped; // address of host on the device
	owcu_ptr device; // 0 if none
	owcu_handle *streams, *events;
	int nstreams, nevents;
};

// owcu_arena_new registers [host, host+n), allocates `room` bytes on the device (0 for none), and makes streams
// and events. Threads that wait for one of the first `sleepers` events sleep, and for the others they spin. It makes
// everything or nothing. arena must be zero. -1 means that everything has been freed. 1 means that the driver could
// not free something. The caller must then call owcu_arena_free, which waits for the streams' work and can also
// return 1, in which case it must be called again.
int owcu_arena_new(owcu_handle ctx, struct owcu_arena *arena, void *host, uint64_t n, uint64_t room, int nstreams, int nevents,
                  int sleepers, struct owcu_error *e);
int owcu_arena_free(owcu_handle ctx, struct owcu_arena *arena, struct owcu_error *e);

// owcu_arena_fill_entered and owcu_arena_free_entered do the same for a caller that is already in the context. If
// the former fails, the caller must call the latter, which waits for the streams' work.
int owcu_arena_fill_entered(struct owcu_arena *arena, void *host, uint64_t n, uint64_t room, int nstreams, int nevents,
                          int sleepers, struct owcu_error *e);
int owcu_arena_free_entered(struct owcu_arena *arena, struct owcu_error *e);

// owcu_stream_follow makes a stream wait for the work that is queued on other streams, with an event that the first
// call makes. Only one caller at a time may use the event.
int owcu_stream_follow(owcu_handle ctx, owcu_handle *event, uint64_t stream, const uint64_t *after, uint64_t nafter, struct owcu_error *e);
// owcu_copy queues a copy between any two addresses. If wait is set, it waits for the copy.
int owcu_copy(owcu_handle ctx, uint64_t stream, owcu_ptr dst, owcu_ptr src, uint64_t n, int wait, struct owcu_error *e);
int owcu_stream_new(owcu_handle ctx, uint64_t *stream, struct owcu_error *e);
int owcu_stream_free(owcu_handle ctx, uint64_t stream, struct owcu_error *e);
int owcu_stream_sync(owcu_handle ctx, uint64_t stream, struct owcu_error *e);
// owcu_check_stream checks whether a stream belongs to this context.
int owcu_check_stream(owcu_handle ctx, uint64_t stream, int *here, struct owcu_error *e);
// owcu_swap_capture_mode sets the thread's mode of stream capture and returns the previous one, or -1.
int owcu_swap_capture_mode(int mode);
// owcu_pointer_device returns the number of the device that an address belongs to, or -1.
int owcu_pointer_device(owcu_ptr p);

// owcu_export_ipc makes a handle with which other processes can map an allocation. owcu_map_ipc maps an allocation of
// another process. owcu_try_release unmaps it.
int owcu_export_ipc(owcu_handle ctx, owcu_ptr p, struct owcu_ipc *handle, struct owcu_error *e);
int owcu_map_ipc(owcu_handle ctx, const struct owcu_ipc *handle, owcu_ptr *p, struct owcu_error *e);

#endif
