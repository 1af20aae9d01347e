// Codec jobs: a list of buffers in, a list of results out.
#include "_cgo_export.h"
#include "ow.h"

#include <stdlib.h>

// buffers_of reads a list of (address, bytes, own, out address, out bytes). The
// result is to be freed; NULL: an exception.
static struct ow_buffer *buffers_of(PyObject *list, Py_ssize_t *n)
{
	int ok = 0;

	if (!PyList_Check(list)) {
		PyErr_SetString(PyExc_TypeError, "buffers is a list");
		return NULL;
	}
	// A tuple of its own, so that no other thread changes the list meanwhile.
	PyObject *buffers = PyList_AsTuple(list);
	if (buffers == NULL)
		return NULL;
	*n = PyTuple_Size(buffers);
	struct ow_buffer *in = calloc((size_t)*n + 1, sizeof *in);
	if (in == NULL) {
		PyErr_NoMemory();
		goto out;
	}
	for (Py_ssize_t i = 0; i < *n; i++) {
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
	ok = 1;
out:
	Py_DECREF(buffers);
	if (ok)
		return in;
	free(in);
	return NULL;
}

// codec_start(spec, buffers): all of the buffers' memory stays as it is until
// the job has ended.
PyObject *ow_codec_start(PyObject *self, PyObject *args)
{
	PyObject *spec, *list;
	Py_ssize_t spec_len, n;
	uint64_t job = 0;

	(void)self;
	if (ow_child() || !PyArg_UnpackTuple(args, "codec_start", 2, 2, &spec, &list))
		return NULL;
	const char *text = ow_text(spec, &spec_len);
	struct ow_buffer *in = text != NULL ? buffers_of(list, &n) : NULL;
	if (in == NULL)
		return NULL;
	char *err;
	Py_BEGIN_ALLOW_THREADS
	err = ow_go_codec((char *)text, spec_len, in, n, &job);
	Py_END_ALLOW_THREADS
	free(in);
	return err != NULL ? ow_raise(err) : PyLong_FromUnsignedLongLong(job);
}

// rows_of makes a list of results and takes them over: for every buffer (capsule
// or None, address, bytes, error text or None, whether checksums were compared).
static PyObject *rows_of(struct ow_coded *items, int64_t n)
{
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

// codec_take(job): the rows of what came of it.
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
	return rows_of(items, n);
}

// codec_now(spec, buffers): the rows of what comes of it, at once; None where
// that may take long: then it is a job's work, and nothing was done.
PyObject *ow_codec_now(PyObject *self, PyObject *args)
{
	PyObject *spec, *list;
	Py_ssize_t spec_len, n;
	struct ow_coded *items = NULL;
	int64_t made = 0;
	int done = 0;
	char *err;

	(void)self;
	if (ow_child() || !PyArg_UnpackTuple(args, "codec_now", 2, 2, &spec, &list))
		return NULL;
	const char *text = ow_text(spec, &spec_len);
	struct ow_buffer *in = text != NULL ? buffers_of(list, &n) : NULL;
	if (in == NULL)
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	err = ow_go_codec_now((char *)text, spec_len, in, n, &items, &made, &done);
	Py_END_ALLOW_THREADS
	free(in);
	if (err != NULL)
		return ow_raise(err);
	if (!done)
		Py_RETURN_NONE;
	return rows_of(items, made);
}
