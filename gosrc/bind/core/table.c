// The table of a model's tensors: one list of tuples out of the buffer that
// face.PackTable lays out.
#include "_cgo_export.h"
#include "ow.h"

#include <stdlib.h>
#include <string.h>

static int64_t next(const char **p)
{
	int64_t v;
	memcpy(&v, *p, sizeof v);
	*p += sizeof v;
	return v;
}

static PyObject *row(const char **p, PyObject *const *dtypes)
{
	int64_t name_len = next(p), dtype = next(p), rank = next(p);
	PyObject *shape = PyTuple_New((Py_ssize_t)rank);
	if (shape == NULL)
		return NULL;
	for (int64_t i = 0; i < rank; i++) {
		PyObject *d = PyLong_FromLongLong(next(p));
		if (d == NULL) {
			Py_DECREF(shape);
			return NULL;
		}
		PyTuple_SetItem(shape, (Py_ssize_t)i, d);
	}
	long long bytes = next(p), stored = next(p), source = next(p), alias = next(p);
	const char *name = *p;
	*p += name_len;
	return Py_BuildValue("(s#ONLLLL)", name, (Py_ssize_t)name_len, dtypes[dtype], shape, bytes, stored, source, alias);
}

// model_table(model): [(name, dtype, shape, bytes, stored, source, alias)].
PyObject *ow_model_table(PyObject *self, PyObject *handle)
{
	enum { most = 64 };
	PyObject *dtypes[most] = {NULL}, *list = NULL;
	uint64_t h;
	char *buffer = NULL, *err;

	(void)self;
	if (ow_child() || ow_handle(handle, &h))
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	err = ow_go_table(h, &buffer);
	Py_END_ALLOW_THREADS
	if (err != NULL)
		return ow_raise(err);

	const char *p = buffer;
	int64_t n = next(&p), names = next(&p);
	if (names > most) {
		PyErr_SetString(PyExc_SystemError, "overwire: more dtypes than the table builder has room for");
		goto out;
	}
	for (int64_t i = 0; i < names; i++) {
		int64_t len = next(&p);
		dtypes[i] = PyUnicode_FromStringAndSize(p, (Py_ssize_t)len);
		if (dtypes[i] == NULL)
			goto out;
		p += len;
	}
	list = PyList_New((Py_ssize_t)n);
	for (int64_t i = 0; list != NULL && i < n; i++) {
		PyObject *t = row(&p, dtypes);
		if (t == NULL)
			Py_CLEAR(list);
		else
			PyList_SetItem(list, (Py_ssize_t)i, t);
	}
out:
	for (int i = 0; i < most; i++)
		Py_XDECREF(dtypes[i]);
	free(buffer);
	return list;
}
