// Handing tensors out: the lists of job_next and job_take, built in one go, as
// tuples or, where tens of thousands are handed out, as columns.
#include "_cgo_export.h"
#include "ow.h"

#include <stdlib.h>

// Each result is a tuple (position, capsule or None, address) for job_next and
// (capsule or None, address) for job_take. Takes over items and what is in
// them, also when it fails.
static PyObject *list_of(struct ow_item *items, int64_t n, int with_position)
{
	PyObject *list = PyList_New((Py_ssize_t)n);
	int64_t i = 0;

	for (; list != NULL && i < n; i++) {
		struct ow_item *it = &items[i];
		PyObject *capsule, *tuple;
		if (it->managed != NULL) {
			capsule = ow_capsule(it->managed);
		} else {
			Py_INCREF(Py_None);
			capsule = Py_None;
		}
		if (capsule == NULL)
			tuple = NULL;
		else if (with_position)
			tuple = Py_BuildValue("(LNK)", (long long)it->at, capsule, (unsigned long long)(uintptr_t)it->data);
		else
			tuple = Py_BuildValue("(NK)", capsule, (unsigned long long)(uintptr_t)it->data);
		if (tuple == NULL) {
			Py_CLEAR(list);
			i++;
			break;
		}
		PyList_SetItem(list, (Py_ssize_t)i, tuple);
	}
	for (; i < n; i++) // no memory: nobody else will free the rest
		if (items[i].managed != NULL)
			ow_managed_delete(items[i].managed);
	free(items);
	return list;
}

// The same as (capsules, other): with positions, other has the position of each
// capsule, and what has none, or no bytes, is left out; without, such entries
// are None, and other has their positions.
static PyObject *columns_of(struct ow_item *items, int64_t n, int with_position)
{
	PyObject *capsules = PyList_New(0), *other = PyList_New(0), *both = NULL;
	int ok = capsules != NULL && other != NULL;
	int64_t i = 0;

	for (; ok && i < n; i++) {
		struct ow_item *it = &items[i];
		int usable = it->managed != NULL && it->data != NULL;
		if (it->managed != NULL && !usable)
			ow_managed_delete(it->managed);
		if (usable || !with_position) {
			PyObject *capsule = usable ? ow_capsule(it->managed) : NULL;
			ok = !usable || capsule != NULL;
			ok = ok && PyList_Append(capsules, usable ? capsule : Py_None) == 0;
			Py_XDECREF(capsule);
		}
		if (ok && usable == with_position) {
			PyObject *at = PyLong_FromLongLong(it->at);
			ok = at != NULL && PyList_Append(other, at) == 0;
			Py_XDECREF(at);
		}
	}
	for (; i < n; i++) // no memory: nobody else will free the rest
		if (items[i].managed != NULL)
			ow_managed_delete(items[i].managed);
	free(items);
	if (ok)
		both = PyTuple_New(2);
	if (both == NULL) {
		Py_XDECREF(capsules);
		Py_XDECREF(other);
		return NULL;
	}
	PyTuple_SetItem(both, 0, capsules);
	PyTuple_SetItem(both, 1, other);
	return both;
}

static PyObject *next_of(PyObject *args, const char *name, int columns);

// job_next(job, timeout, raw): what has landed since the last call; an empty
// list when nothing will follow, or time is up.
PyObject *ow_job_next(PyObject *self, PyObject *args)
{
	(void)self;
	return next_of(args, "job_next", 0);
}

// job_gather(job, timeout, raw): the same in columns, (capsules, positions), of
// what has bytes; None when nothing will follow, or time is up.
PyObject *ow_job_gather(PyObject *self, PyObject *args)
{
	(void)self;
	return next_of(args, "job_gather", 1);
}

static PyObject *nothing(int columns)
{
	if (!columns)
		return PyList_New(0);
	Py_INCREF(Py_None);
	return Py_None;
}

static PyObject *next_of(PyObject *args, const char *name, int columns)
{
	PyObject *job, *timeout, *raw;
	uint64_t h;
	int64_t deadline;

	if (ow_child() || !PyArg_UnpackTuple(args, name, 3, 3, &job, &timeout, &raw) || ow_handle(job, &h) ||
	    ow_deadline(timeout, &deadline))
		return NULL;
	int as_raw = PyObject_IsTrue(raw);
	if (as_raw < 0)
		return NULL;
	for (;;) {
		int64_t ns = ow_slice(deadline), n = 0;
		struct ow_item *items = NULL;
		int over = 0;
		char *err;
		Py_BEGIN_ALLOW_THREADS
		err = ow_go_next(h, ns, as_raw, &items, &n, &over);
		Py_END_ALLOW_THREADS
		if (err != NULL)
			return ow_raise(err);
		if (n > 0)
			return columns ? columns_of(items, n, 1) : list_of(items, n, 1);
		if (over)
			return nothing(columns);
		if (PyErr_CheckSignals())
			return NULL;
		if (ow_slice(deadline) == 0)
			return nothing(columns);
	}
}

static PyObject *take_of(PyObject *args, const char *name, int columns)
{
	PyObject *job, *raw;
	uint64_t h;
	struct ow_item *items = NULL;
	int64_t n = 0;
	char *err;

	if (ow_child() || !PyArg_UnpackTuple(args, name, 2, 2, &job, &raw) || ow_handle(job, &h))
		return NULL;
	int as_raw = PyObject_IsTrue(raw);
	if (as_raw < 0)
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	err = ow_go_take(h, as_raw, &items, &n);
	Py_END_ALLOW_THREADS
	if (err != NULL)
		return ow_raise(err);
	return columns ? columns_of(items, n, 0) : list_of(items, n, 0);
}

// job_take(job, raw): every tensor of a load that has ended, by request.
PyObject *ow_job_take(PyObject *self, PyObject *args)
{
	(void)self;
	return take_of(args, "job_take", 0);
}

// job_capsules(job, raw): the same in columns, (capsules, positions without one).
PyObject *ow_job_capsules(PyObject *self, PyObject *args)
{
	(void)self;
	return take_of(args, "job_capsules", 1);
}
