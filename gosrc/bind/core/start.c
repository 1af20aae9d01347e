// Starting jobs that take more than a text: loads with a packed list of
// requests, saves with a list of tensors.
#include "_cgo_export.h"
#include "ow.h"

#include <stdlib.h>

// load_start(model, requests, options): requests is None (every tensor, whole)
// or bytes of six native int64 a request.
PyObject *ow_load_start(PyObject *self, PyObject *args)
{
	PyObject *model, *requests, *options;
	uint64_t h, job = 0;
	char *packed = NULL, *err;
	Py_ssize_t bytes = -1, n;

	(void)self;
	if (ow_child() || !PyArg_UnpackTuple(args, "load_start", 3, 3, &model, &requests, &options) || ow_handle(model, &h))
		return NULL;
	if (requests != Py_None && PyBytes_AsStringAndSize(requests, &packed, &bytes))
		return NULL;
	const char *text = ow_text(options, &n);
	if (text == NULL)
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	err = ow_go_load(h, packed, bytes, (char *)text, n, &job);
	Py_END_ALLOW_THREADS
	if (err != NULL)
		return ow_raise(err);
	return PyLong_FromUnsignedLongLong(job);
}

// Reads (name, dtype, shape, address, bytes) into in, and the dimensions into
// dims, which has room for most of them. Strings stay the tuple's.
static int read_input(PyObject *tuple, struct ow_input *in, int64_t *dims, Py_ssize_t most)
{
	Py_ssize_t n;

	if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 5) {
		PyErr_SetString(PyExc_TypeError, "a tensor is a tuple (name, dtype, shape, address, bytes)");
		return -1;
	}
	PyObject *shape = PyTuple_GetItem(tuple, 2);
	if (!PyTuple_Check(shape) || PyTuple_Size(shape) > most) {
		PyErr_SetString(PyExc_TypeError, "a shape is a tuple, and stays the same");
		return -1;
	}
	if ((in->name = ow_text(PyTuple_GetItem(tuple, 0), &n)) == NULL)
		return -1;
	in->name_len = n;
	if ((in->dtype = ow_text(PyTuple_GetItem(tuple, 1), &n)) == NULL)
		return -1;
	in->dtype_len = n;
	in->shape = dims;
	in->ndim = PyTuple_Size(shape);
	for (int64_t i = 0; i < in->ndim; i++) {
		dims[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, (Py_ssize_t)i));
		if (dims[i] == -1 && PyErr_Occurred())
			return -1;
	}
	in->data = PyLong_AsVoidPtr(PyTuple_GetItem(tuple, 3));
	if (in->data == NULL && PyErr_Occurred())
		return -1;
	in->bytes = PyLong_AsLongLong(PyTuple_GetItem(tuple, 4));
	return in->bytes == -1 && PyErr_Occurred() ? -1 : 0;
}

// save_start(spec, tensors): tensors is a list of tuples as read_input takes
// them; the memory they point to stays as it is until the job has ended.
PyObject *ow_save_start(PyObject *self, PyObject *args)
{
	PyObject *spec, *list;
	struct ow_input *in = NULL;
	int64_t *dims = NULL;
	uint64_t job = 0;
	Py_ssize_t spec_len, total = 0, used = 0;
	int ok = 0;

	(void)self;
	if (ow_child() || !PyArg_UnpackTuple(args, "save_start", 2, 2, &spec, &list))
		return NULL;
	const char *text = ow_text(spec, &spec_len);
	if (text == NULL)
		return NULL;
	if (!PyList_Check(list)) {
		PyErr_SetString(PyExc_TypeError, "tensors is a list");
		return NULL;
	}
	// A tuple of its own, so that no other thread changes the list meanwhile.
	PyObject *tensors = PyList_AsTuple(list);
	if (tensors == NULL)
		return NULL;
	Py_ssize_t n = PyTuple_Size(tensors);
	for (Py_ssize_t i = 0; i < n; i++) {
		PyObject *t = PyTuple_GetItem(tensors, i);
		if (PyTuple_Check(t) && PyTuple_Size(t) == 5 && PyTuple_Check(PyTuple_GetItem(t, 2)))
			total += PyTuple_Size(PyTuple_GetItem(t, 2));
	}
	in = calloc((size_t)n + 1, sizeof *in);
	dims = calloc((size_t)total + 1, sizeof *dims);
	if (in == NULL || dims == NULL) {
		PyErr_NoMemory();
		goto out;
	}
	for (Py_ssize_t i = 0; i < n; i++) {
		if (read_input(PyTuple_GetItem(tensors, i), &in[i], dims + used, total - used))
			goto out;
		used += (Py_ssize_t)in[i].ndim;
	}
	char *err;
	Py_BEGIN_ALLOW_THREADS
	err = ow_go_save((char *)text, spec_len, in, n, &job);
	Py_END_ALLOW_THREADS
	if (err != NULL)
		ow_raise(err);
	else
		ok = 1;
out:
	Py_DECREF(tensors);
	free(in);
	free(dims);
	return ok ? PyLong_FromUnsignedLongLong(job) : NULL;
}
