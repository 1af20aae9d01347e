// Declares what the C files of this package share.
#ifndef OW_H
#define OW_H

#include <Python.h>
#include <stdint.h>

#include "core_go.h"

// package dlpack
void ow_managed_delete(void *managed);
int ow_fork_watch(void);
int ow_fork_flag(void);

// errs.c. ow_raised makes the exception that is set, an error from Go, the one that
// its text names, and returns NULL.
PyObject *ow_raised(void);
// ow_raise_by raises what a function of overwire.errors makes of an argument.
void ow_raise_by(const char *function, PyObject *argument);
// ow_child raises ForkedError and returns 1 in a forked child of the process
// that loaded the engine, where Go must not be entered.
int ow_child(void);

// wait.c. A deadline is on the monotonic clock; ow_slice is the part of what is
// left that one sleep may take, in nanoseconds, 0 when it has passed.
int ow_deadline(PyObject *timeout, int64_t *deadline);
int64_t ow_slice(int64_t deadline);

// call.c. ow_forget forgets a handle, and keeps the exception that is set.
enum { free_now, free_ended, free_called }; // as binding.Free has them
void ow_forget(uint64_t handle, int how);
int ow_handle(PyObject *o, uint64_t *h);
// ow_handle_of makes the object that owns a handle: of the class Job or Model that
// setup was given. Without memory the handle is freed.
enum { kind_job, kind_model };
PyObject *ow_handle_of(int kind, uint64_t handle);

// result.c. ow_result makes a Result out of a struct ow_result at an address.
PyObject *ow_result(uint64_t address);

// table.c: the rows of a model's table, and a tuple of n int64, aligned or not.
PyObject *ow_rows(const char *buffer);
PyObject *ow_tuple(const void *numbers, int64_t n);

// memory.c. A new "dltensor" capsule that owns managed, or NULL (managed is
// then freed).
PyObject *ow_capsule(void *managed);

// The functions of the module.
PyObject *ow_forked(PyObject *self, PyObject *none);
PyObject *ow_setup(PyObject *self, PyObject *args);
PyObject *ow_call(PyObject *self, PyObject *args);
PyObject *ow_run(PyObject *self, PyObject *args);
PyObject *ow_start(PyObject *self, PyObject *args);
PyObject *ow_wait(PyObject *self, PyObject *args);
PyObject *ow_take(PyObject *self, PyObject *args);
PyObject *ow_free(PyObject *self, PyObject *args);
PyObject *ow_buffer_of(PyObject *self, PyObject *args);
PyObject *ow_dlpack_take(PyObject *self, PyObject *capsule);
PyObject *ow_dlpack_give(PyObject *self, PyObject *args);
int ow_add_exporter(PyObject *module); // the type Exporter

#endif
