// Handing tensors out: the lists of job_next and job_take, built in one go.
#include "_cgo_export.h"
#include "ow.h"

#include <stdlib.h>

// tuple_of takes over n objects, of which any may be NULL: then it fails.
static PyObject *tuple_of(PyObject **part, int n)
{
	PyObject *t = PyTuple_New(n);

	for (int i = 0; i < n; i++)
		if (part[i] == NULL)
			Py_CLEAR(t);
	for (int i = 0; i < n; i++)
		if (t != NULL)
			PyTuple_SetItem(t, i, part[i]);
		else
			Py_XDECREF(part[i]);
	return t;
}

// result is what Python gets for an item, of which it takes over what is in it.
static PyObject *result(struct ow_item *it, int with_position, PyObject *adopt)
{
	PyObject *part[3];
	int n = 0;

	if (with_position)
		part[n++] = PyLong_FromLongLong(it->at);
	if (adopt != NULL && it->data == NULL && it->managed != NULL) {
		ow_managed_delete(it->managed);
		it->managed = NULL;
	}
	if (it->managed != NULL)
		part[n] = ow_capsule(it->managed);
	else
		part[n] = Py_NewRef(Py_None);
	if (adopt == NULL) {
		part[n + 1] = PyLong_FromUnsignedLongLong((uintptr_t)it->data);
		return tuple_of(part, n + 2);
	}
	if (part[n] != NULL && part[n] != Py_None) {
		PyObject *capsule = part[n];
		part[n] = PyObject_CallFunctionObjArgs(adopt, capsule, NULL);
		Py_DECREF(capsule);
	}
	return n == 0 ? part[0] : tuple_of(part, n + 1);
}

// Each result is a tuple (position, capsule or None, address) for job_next and
// (capsule or None, address) for job_take; with adopt, (position, what adopt makes
// of the capsule) and what adopt makes, None where there is none or no bytes.
// Takes over items and what is in them, also when it fails.
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

// job_next(job, timeout, raw, adopt): what has landed since the last call; an
// empty list when nothing will follow, or time is up. adopt as in job_take.
PyObject *ow_job_next(PyObject *self, PyObject *args)
{
	PyObject *job, *timeout, *raw, *adopt;
	uint64_t h;
	int64_t deadline;

	(void)self;
	if (ow_child() || !PyArg_UnpackTuple(args, "job_next", 4, 4, &job, &timeout, &raw, &adopt) || ow_handle(job, &h) ||
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
			return list_of(items, n, 1, adopt == Py_None ? NULL : adopt);
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
