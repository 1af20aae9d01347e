// Declares the functions that the C files of this package share.
#ifndef OW_H
#define OW_H

#include <Python.h>
#include <stdint.h>

#include "core_go.h"

// package dlpack
void ow_managed_delete(void *managed);
int ow_fork_watch(void);
int ow_fork_flag(void);

// errs.c. ow_raised replaces the current exception, an error from Go, with the exception that its text names, and
// returns NULL.
PyObject *ow_raised(void);
// ow_raise_by raises the exception that a function of overwire.errors returns for an argument.
void ow_raise_by(const char *function, PyObject *argument);
// ow_child raises ForkedError and returns 1 in a forked child of the process
// that loaded the engine, where Go code must not run.
int ow_child(void);

// wait.c. A deadline is a time of the monotonic clock. ow_slice returns how many nanoseconds to sleep before checking
// signals again, or 0 if the deadline has passed.
int ow_deadline(PyObject *timeout, int64_t *deadline);
int64_t ow_slice(int64_t deadline);

// call.c. ow_forget frees a handle without changing the current exception.
enum { free_now, free_ended, free_called }; // the same values as in package binding
void ow_forget(uint64_t handle, int how);
int ow_handle(PyObject *o, uint64_t *h);
// ow_handle_of makes the object that owns a handle, of the class Job or Model that was passed to
// setup. If memory runs out, it frees the handle.
enum { kind_job, kind_model };
PyObject *ow_handle_of(int kind, uint64_t handle);

// result.c. ow_result converts the struct ow_result at an address to a Result.
PyObject *ow_result(uint64_t address);

// table.c. ow_rows returns the rows of a model's table. ow_tuple returns a tuple of n int64, which may be unaligned.
PyObject *ow_rows(const char *buffer);
PyObject *ow_tuple(const void *numbers, int64_t n);

// memory.c. ow_capsule returns a new "dltensor" capsule that owns managed. After an error it returns NULL and has freed
// managed.
PyObject *ow_capsule(void *managed);

// Functions of the module.
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
