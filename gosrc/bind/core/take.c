// Handing tensors out: the lists of job_next and job_take, built in one go.
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

// job_next(job, timeout, raw): what has landed since the last call; an empty
// list when nothing will follow, or time is up.
PyObject *ow_job_next(PyObject *self, PyObject *args)
{
	PyObject *job, *timeout, *raw;
	uint64_t h;
	int64_t deadline;

	(void)self;
	if (ow_child() || !PyArg_UnpackTuple(args, "job_next", 3, 3, &job, &timeout, &raw) || ow_handle(job, &h) ||
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
		if (n > 0 || over)
			return list_of(items, n, 1);
		if (PyErr_CheckSignals())
			return NULL;
		if (ow_slice(deadline) == 0)
			return PyList_New(0);
	}
}

// job_take(job, raw): every tensor of a load that has ended, by request.
PyObject *ow_job_take(PyObject *self, PyObject *args)
{
	PyObject *job, *raw;
	uint64_t h;
	struct ow_item *items = NULL;
	int64_t n = 0;
	char *err;

	(void)self;
	if (ow_child() || !PyArg_UnpackTuple(args, "job_take", 2, 2, &job, &raw) || ow_handle(job, &h))
		return NULL;
	int as_raw = PyObject_IsTrue(raw);
	if (as_raw < 0)
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	err = ow_go_take(h, as_raw, &items, &n);
	Py_END_ALLOW_THREADS
	if (err != NULL)
		return ow_raise(err);
	return list_of(items, n, 0);
}
