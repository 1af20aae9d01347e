// Converts the buffer of binding.PackTable, a model's table of tensors, to a list of tuples.
#include "ow.h"

#include <string.h>

static int64_t next(const char **p)
{
	int64_t v;
	memcpy(&v, *p, sizeof v);
	*p += sizeof v;
	return v;
}

// common caches objects that rows share. Most of a model's thousands of tensors have the same shapes and dtypes.
struct common {
	const char *dims; // points into the buffer
	int64_t rank, bytes;
	PyObject *shape, *count; // owned; NULL if not used yet
};

enum { commons = 16 };

PyObject *ow_tuple(const void *numbers, int64_t n)
{
	const char *p = numbers;
	PyObject *t = PyTuple_New((Py_ssize_t)n);
	for (int64_t i = 0; t != NULL && i < n; i++) {
		PyObject *d = PyLong_FromLongLong(next(&p));
		if (d == NULL)
			Py_CLEAR(t);
		else
			PyTuple_SetItem(t, (Py_ssize_t)i, d);
	}
	return t;
}

static struct common *common_of(struct common *known, const char *dims, int64_t rank, int64_t bytes)
{
	uint64_t hash = (uint64_t)bytes;
	const char *p = dims;
	for (int64_t i = 0; i < rank; i++)
		hash = hash * 31 + (uint64_t)next(&p);
	struct common *c = &known[(hash ^ hash >> 12 ^ hash >> 24) % commons];
	if (c->shape != NULL && c->rank == rank && c->bytes == bytes && memcmp(c->dims, dims, 8 * (size_t)rank) == 0)
		return c;
	Py_CLEAR(c->shape);
	Py_CLEAR(c->count);
	c->dims = dims, c->rank = rank, c->bytes = bytes;
	c->count = PyLong_FromLongLong(bytes);
	c->shape = c->count == NULL ? NULL : ow_tuple(dims, rank);
	return c->shape == NULL ? NULL : c;
}

static PyObject *row(const char **p, PyObject *const *dtypes, struct common *known)
{
	int64_t name_len = next(p), dtype = next(p), rank = next(p);
	const char *dims = *p;
	*p += 8 * rank;
	int64_t bytes = next(p), stored = next(p), source = next(p), alias = next(p);
	const char *name = *p;
	*p += name_len;
	struct common *c = common_of(known, dims, rank, bytes);
	PyObject *t = c == NULL ? NULL : PyTuple_New(7);
	if (t == NULL)
		return NULL;
	PyTuple_SetItem(t, 0, PyUnicode_FromStringAndSize(name, (Py_ssize_t)name_len));
	PyTuple_SetItem(t, 1, Py_NewRef(dtypes[dtype]));
	PyTuple_SetItem(t, 2, Py_NewRef(c->shape));
	PyTuple_SetItem(t, 3, Py_NewRef(c->count));
	PyTuple_SetItem(t, 4, stored == bytes ? Py_NewRef(c->count) : PyLong_FromLongLong(stored));
	PyTuple_SetItem(t, 5, PyLong_FromLongLong(source));
	PyTuple_SetItem(t, 6, PyLong_FromLongLong(alias));
	if (PyErr_Occurred()) // out of memory, or a name that is not UTF-8
		Py_CLEAR(t);
	return t;
}

// ow_rows returns [(name, dtype, shape, bytes, stored, source, alias)].
PyObject *ow_rows(const char *buffer)
{
	enum { most = 64 };
	PyObject *dtypes[most] = {NULL}, *list = NULL;
	struct common known[commons] = {{0}};
	const char *p = buffer;
	int64_t n = next(&p), names = next(&p);

	if (names > most) {
		PyErr_SetString(PyExc_SystemError, "overwire: the table has more dtypes than the engine supports");
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
		PyObject *t = row(&p, dtypes, known);
		if (t == NULL)
			Py_CLEAR(list);
		else
			PyList_SetItem(list, (Py_ssize_t)i, t);
	}
out:
	for (int i = 0; i < most; i++)
		Py_XDECREF(dtypes[i]);
	for (int i = 0; i < commons; i++) {
		Py_XDECREF(known[i].shape);
		Py_XDECREF(known[i].count);
	}
	return list;
}
