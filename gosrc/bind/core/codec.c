// Codec jobs: a list of buffers in, a list of results out.
#include "_cgo_export.h"
#include "ow.h"

#include <stdlib.h>

// codec_start(spec, buffers): buffers is a list of (address, bytes, own,
// out address, out bytes); all of that memory stays as it is until the job has
// ended.
PyObject *ow_codec_start(PyObject *self, PyObject *args)
{
	PyObject *spec, *list;
	Py_ssize_t spec_len;
	uint64_t job = 0;
	int ok = 0;

	(void)self;
	if (ow_child() || !PyArg_UnpackTuple(args, "codec_start", 2, 2, &spec, &list))
		return NULL;
	const char *text = ow_text(spec, &spec_len);
	if (text == NULL)
		return NULL;
	if (!PyList_Check(list)) {
		PyErr_SetString(PyExc_TypeError, "buffers is a list");
		return NULL;
	}
	// A tuple of its own, so that no other thread changes the list meanwhile.
	PyObject *buffers = PyList_AsTuple(list);
	if (buffers == NULL)
		return NULL;
	Py_ssize_t n = PyTuple_Size(buffers);
	struct ow_buffer *in = calloc((size_t)n + 1, sizeof *in);
	if (in == NULL) {
		PyErr_NoMemory();
		goto out;
	}
	for (Py_ssize_t i = 0; i < n; i++) {
		PyObject *b = PyTuple_GetItem(buffers, i);
		if (!PyTuple_Check(b) || PyTuple_Size(b) != 5) {
			PyErr_SetString(PyExc_TypeError, "a buffer is a tuple (address, bytes, own, out address, out bytes)");
			goto out;
		}
		in[i].src = PyLong_AsVoidPtr(PyTuple_GetItem(b, 0));
		in[i].bytes = PyLong_AsLongLong(PyTuple_GetItem(b, 1));
		in[i].own = PyObject_IsTrue(PyTuple_GetItem(b, 2));
		in[i].out = PyLong_AsVoidPtr(PyTuple_GetItem(b, 3));
		in[i].room = PyLong_AsLongLong(PyTuple_GetItem(b, 4));
		if (PyErr_Occurred())
			goto out;
	}
	char *err;
	Py_BEGIN_ALLOW_THREADS
	err = ow_go_codec((char *)text, spec_len, in, n, &job);
	Py_END_ALLOW_THREADS
	if (err != NULL)
		ow_raise(err);
	else
		ok = 1;
out:
	Py_DECREF(buffers);
	free(in);
	return ok ? PyLong_FromUnsignedLongLong(job) : NULL;
}

// codec_take(job): for every buffer (capsule or None, address, bytes, error
// text or None, whether checksums were compared).
PyObject *ow_codec_take(PyObject *self, PyObject *handle)
{
	struct ow_coded *items = NULL;
	uint64_t h;
	int64_t n = 0;
	char *err;

	(void)self;
	if (ow_child() || ow_handle(handle, &h))
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	err = ow_go_codec_take(h, &items, &n);
	Py_END_ALLOW_THREADS
	if (err != NULL)
		return ow_raise(err);
	PyObject *list = PyList_New((Py_ssize_t)n);
	for (int64_t i = 0; i < n; i++) {
		struct ow_coded *it = &items[i];
		if (list == NULL) { // nobody else will free the rest
			if (it->managed != NULL)
				ow_managed_delete(it->managed);
			free(it->error);
			continue;
		}
		PyObject *capsule = Py_None, *row = NULL;
		if (it->managed != NULL)
			capsule = ow_capsule(it->managed);
		else
			Py_INCREF(Py_None);
		if (capsule != NULL)
			row = Py_BuildValue("(NKLzi)", capsule, (unsigned long long)(uintptr_t)it->data, (long long)it->bytes, it->error, it->summed);
		free(it->error);
		if (row == NULL)
			Py_CLEAR(list);
		else
			PyList_SetItem(list, (Py_ssize_t)i, row);
	}
	free(items);
	return list;
}
