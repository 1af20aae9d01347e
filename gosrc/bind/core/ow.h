// What the hand-written C files of this room share.
#ifndef OW_H
#define OW_H

#include <Python.h>
#include <stdint.h>

// Results of the Go functions that C calls, in memory of malloc.

struct ow_item { // one request of a load that has landed
	int64_t at;    // its position
	void *managed; // a DLManagedTensor, owned by the receiver; NULL: nothing is handed out
	void *data;
};

struct ow_input { // one tensor to be saved; all of it is borrowed for the call
	const char *name;
	int64_t name_len;
	const char *dtype;
	int64_t dtype_len;
	const int64_t *shape;
	int64_t ndim;
	void *data; // borrowed until the job ends
	int64_t bytes;
};

struct ow_buffer { // one buffer to be encoded or decoded; borrowed until the job ends
	void *src;
	int64_t bytes;
	void *out; // with own: where the result goes
	int64_t room;
	int own;
};

struct ow_coded { // its result
	void *managed; // as in ow_item
	void *data;
	int64_t bytes;
	char *error; // of malloc, or NULL
	int summed;
};

struct ow_told { // of one stream of a batch on a GPU
	int64_t size, chunk;
	char *algorithm, *error; // of malloc, or NULL
};

// room dlpack
void ow_managed_delete(void *managed);
int ow_fork_watch(void);
int ow_fork_flag(void);

// fault.c. ow_raise takes a text of malloc from Go, raises it and frees it.
PyObject *ow_raise(char *text);
// ow_child raises ForkedError and returns 1 in a forked child of the process
// that loaded the engine, where Go must not be entered.
int ow_child(void);

// wait.c. A deadline is on the monotonic clock; ow_slice is the part of what is
// left that one sleep may take, in nanoseconds, 0 when it has passed.
int ow_deadline(PyObject *timeout, int64_t *deadline);
int64_t ow_slice(int64_t deadline);

// args.c
int ow_handle(PyObject *o, uint64_t *h);
const char *ow_text(PyObject *o, Py_ssize_t *n); // UTF-8 without NUL, or NULL and an exception

// The functions of the module, one file a duty.
PyObject *ow_forked(PyObject *self, PyObject *none);
PyObject *ow_job_wait(PyObject *self, PyObject *args);
PyObject *ow_call(PyObject *self, PyObject *args);
PyObject *ow_job_next(PyObject *self, PyObject *args);
PyObject *ow_job_take(PyObject *self, PyObject *args);
PyObject *ow_job_gather(PyObject *self, PyObject *args);
PyObject *ow_job_capsules(PyObject *self, PyObject *args);
PyObject *ow_model_table(PyObject *self, PyObject *handle);
PyObject *ow_load_start(PyObject *self, PyObject *args);
PyObject *ow_save_start(PyObject *self, PyObject *args);
PyObject *ow_codec_start(PyObject *self, PyObject *args);
PyObject *ow_codec_take(PyObject *self, PyObject *handle);
PyObject *ow_gpu_decode(PyObject *self, PyObject *args);
PyObject *ow_gpu_encode(PyObject *self, PyObject *args);
PyObject *ow_gpu_peek(PyObject *self, PyObject *args);
PyObject *ow_gpu_wait(PyObject *self, PyObject *args);
PyObject *ow_gpu_alloc(PyObject *self, PyObject *args);
PyObject *ow_gpu_copy(PyObject *self, PyObject *args);
PyObject *ow_codec_now(PyObject *self, PyObject *args);
PyObject *ow_buffer_of(PyObject *self, PyObject *args);
PyObject *ow_dlpack_take(PyObject *self, PyObject *capsule);
PyObject *ow_dlpack_give(PyObject *self, PyObject *args);
int ow_add_exporter(PyObject *module); // the type Exporter

// capsule.c. A new "dltensor" capsule that owns managed, or NULL (managed is
// then freed).
PyObject *ow_capsule(void *managed);

#endif
