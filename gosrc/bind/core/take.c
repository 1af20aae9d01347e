// Handing tensors out: the lists of job_next and job_take, built in one go.
#include "_cgo_export.h"
#include "ow.h"

#include <stdlib.h>

// A number beside a capsule, or two.
static PyObject *tuple_of(PyObject *at, PyObject *capsule, PyObject *data)
{
	PyObject *t = capsule && data ? PyTuple_New(at ? 3 : 2) : NULL;
	Py_ssize_t i = 0;

	if (t == NULL) {
		Py_XDECREF(at);
		Py_XDECREF(capsule);
		Py_XDECREF(data);
		return NULL;
	}
	if (at != NULL)
		PyTuple_SetItem(t, i++, at);
	PyTuple_SetItem(t, i++, capsule);
	PyTuple_SetItem(t, i, data);
	return t;
}

// result is what Python gets for an item, of which it takes over what is in it.
static PyObject *result(struct ow_item *it, int with_position, PyObject *adopt)
{
	PyObject *capsule = NULL, *at = NULL;

	if (adopt != NULL && it->data == NULL) {
		if (it->managed != NULL)
			ow_managed_delete(it->managed);
		it->managed = NULL;
	}
	if (it->managed != NULL) {
		capsule = ow_capsule(it->managed);
	} else {
		Py_INCREF(Py_None);
		capsule = Py_None;
	}
	if (adopt != NULL) {
		if (capsule == NULL || capsule == Py_None)
			return capsule;
		PyObject *made = PyObject_CallFunctionObjArgs(adopt, capsule, NULL);
		Py_DECREF(capsule);
		return made;
	}
	if (with_position && (at = PyLong_FromLongLong(it->at)) == NULL) {
		Py_XDECREF(capsule);
		return NULL;
	}
	return tuple_of(at, capsule, PyLong_FromUnsignedLongLong((uintptr_t)it->data));
}

// Each result is a tuple (position, capsule or None, address) for job_next and
// (capsule or None, address) for job_take, or what adopt makes of the capsule,
// None where there is none or no bytes. Takes over items and what is in them,
// also when it fails.
static PyObject *list_of(struct ow_item *items, int64_t n, int with_position, PyObject *adopt)
{
	PyObject *list = PyList_New((Py_ssize_t)n);
	int64_t i = 0;

	while (list != NULL && i < n) {
		PyObject *o = result(&items[i++], with_position, adopt);
		if (o == NULL)
			Py_CLEAR(list);
		else
			PyList_SetItem(list, (Py_ssize_t)i - 1, o);
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
			return list_of(items, n, 1, NULL);
		if (PyErr_CheckSignals())
			return NULL;
		if (ow_slice(deadline) == 0)
			return PyList_New(0);
	}
}

// job_take(job, raw, adopt): every tensor of a load that has ended, by request;
// adopt is None, or a callable of a capsule.
PyObject *ow_job_take(PyObject *self, PyObject *args)
{
	PyObject *job, *raw, *adopt;
	uint64_t h;
	struct ow_item *items = NULL;
	int64_t n = 0;
	char *err;

	(void)self;
	if (ow_child() || !PyArg_UnpackTuple(args, "job_take", 3, 3, &job, &raw, &adopt) || ow_handle(job, &h))
		return NULL;
	int as_raw = PyObject_IsTrue(raw);
	if (as_raw < 0)
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	err = ow_go_take(h, as_raw, &items, &n);
	Py_END_ALLOW_THREADS
	if (err != NULL)
		return ow_raise(err);
	return list_of(items, n, 0, adopt == Py_None ? NULL : adopt);
}
