// Memory, copies and batches on GPUs: calls that must be short.
#define PY_SSIZE_T_CLEAN
#include "_cgo_export.h"
#include "ow.h"

#include <stdlib.h>

// Where work goes: a device, a stream, and streams that come first, as packed
// native uint64.
struct place {
	int device;
	unsigned long long stream;
	const char *after;
	Py_ssize_t nafter;
};

// Streams are packed by five native int64: see face.GPUDecode.
struct list {
	int kind;
	const char *algorithm;
	Py_ssize_t algorithm_len;
	const char *packed;
	Py_ssize_t bytes;
};

static int parse(PyObject *args, const char *format, struct place *p, struct list *l)
{
	if (ow_child() || !PyArg_ParseTuple(args, format, &p->device, &p->stream, &p->after, &p->nafter, &l->kind, &l->algorithm,
	                                    &l->algorithm_len, &l->packed, &l->bytes))
		return -1;
	if (p->nafter % 8 || l->bytes % 40) {
		PyErr_SetString(PyExc_ValueError, "packed numbers of a wrong length");
		return -1;
	}
	return 0;
}

PyObject *ow_gpu_decode(PyObject *self, PyObject *args)
{
	struct place p;
	struct list l;
	uint64_t batch = 0;
	char *err;

	(void)self;
	if (parse(args, "iKy#is#y#", &p, &l))
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	err = ow_go_gpu_decode(p.device, p.stream, (void *)p.after, p.nafter / 8, l.kind, (char *)l.algorithm, l.algorithm_len,
	                       (void *)l.packed, l.bytes / 8, &batch);
	Py_END_ALLOW_THREADS
	if (err != NULL)
		return ow_raise(err);
	return PyLong_FromUnsignedLongLong(batch);
}

// gpu_peek: for each stream (size, chunk, algorithm or None, error text or None).
PyObject *ow_gpu_peek(PyObject *self, PyObject *args)
{
	struct place p;
	struct list l;
	struct ow_told *told = NULL;
	int64_t n = 0;
	char *err;

	(void)self;
	if (parse(args, "iKy#is#y#", &p, &l))
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	err = ow_go_gpu_peek(p.device, p.stream, (void *)p.after, p.nafter / 8, l.kind, (char *)l.algorithm, l.algorithm_len,
	                     (void *)l.packed, l.bytes / 8, &told, &n);
	Py_END_ALLOW_THREADS
	if (err != NULL)
		return ow_raise(err);
	PyObject *list = PyList_New((Py_ssize_t)n);
	for (int64_t i = 0; i < n; i++) {
		PyObject *row = NULL;
		if (list != NULL)
			row = Py_BuildValue("(LLzz)", (long long)told[i].size, (long long)told[i].chunk, told[i].algorithm, told[i].error);
		free(told[i].algorithm);
		free(told[i].error);
		if (row != NULL)
			PyList_SetItem(list, (Py_ssize_t)i, row);
		else
			Py_CLEAR(list);
	}
	free(told);
	return list;
}

// gpu_encode(device, stream, after, kind, contents, scratch, room):
// contents are packed by six native int64: see face.GPUEncode.
PyObject *ow_gpu_encode(PyObject *self, PyObject *args)
{
	struct place p;
	int kind;
	const char *packed;
	Py_ssize_t bytes;
	unsigned long long scratch;
	long long room;
	uint64_t batch = 0;
	char *err;

	(void)self;
	if (ow_child() || !PyArg_ParseTuple(args, "iKy#iy#KL", &p.device, &p.stream, &p.after, &p.nafter, &kind, &packed, &bytes,
	                                    &scratch, &room))
		return NULL;
	if (p.nafter % 8 || bytes % 48) {
		PyErr_SetString(PyExc_ValueError, "packed numbers of a wrong length");
		return NULL;
	}
	Py_BEGIN_ALLOW_THREADS
	err = ow_go_gpu_encode(p.device, p.stream, (void *)p.after, p.nafter / 8, kind, (void *)packed, bytes / 8, scratch, room,
	                       &batch);
	Py_END_ALLOW_THREADS
	if (err != NULL)
		return ow_raise(err);
	return PyLong_FromUnsignedLongLong(batch);
}

// gpu_wait(batch, wait): for each stream an error text, else None, or its length
// if it was made; None: not yet done.
PyObject *ow_gpu_wait(PyObject *self, PyObject *args)
{
	unsigned long long batch;
	int wait, done = 0;
	char **texts = NULL, *err;
	int64_t n = 0, *sizes = NULL;

	(void)self;
	if (ow_child() || !PyArg_ParseTuple(args, "Kp", &batch, &wait))
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	err = ow_go_gpu_wait(batch, wait, &done, &texts, &sizes, &n);
	Py_END_ALLOW_THREADS
	if (err != NULL)
		return ow_raise(err);
	if (!done)
		Py_RETURN_NONE;
	PyObject *list = PyList_New((Py_ssize_t)n);
	for (int64_t i = 0; i < n; i++) {
		PyObject *row = NULL;
		if (list != NULL)
			row = sizes != NULL && texts[i] == NULL ? PyLong_FromLongLong(sizes[i]) : Py_BuildValue("z", texts[i]);
		free(texts[i]);
		if (row != NULL)
			PyList_SetItem(list, (Py_ssize_t)i, row);
		else
			Py_CLEAR(list);
	}
	free(texts);
	free(sizes);
	return list;
}

// gpu_alloc(device, nbytes): (capsule, address).
PyObject *ow_gpu_alloc(PyObject *self, PyObject *args)
{
	int device;
	long long n;
	void *managed = NULL, *data = NULL;
	char *err;

	(void)self;
	if (ow_child() || !PyArg_ParseTuple(args, "iL", &device, &n))
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	err = ow_go_gpu_alloc(device, n, &managed, &data);
	Py_END_ALLOW_THREADS
	if (err != NULL)
		return ow_raise(err);
	PyObject *capsule = ow_capsule(managed);
	return capsule != NULL ? Py_BuildValue("(NK)", capsule, (unsigned long long)(uintptr_t)data) : NULL;
}

// gpu_copy(device, stream, after, dst, src, nbytes, wait).
PyObject *ow_gpu_copy(PyObject *self, PyObject *args)
{
	struct place p;
	unsigned long long dst, src;
	long long n;
	int wait;
	char *err;

	(void)self;
	if (ow_child() || !PyArg_ParseTuple(args, "iKy#KKLp", &p.device, &p.stream, &p.after, &p.nafter, &dst, &src, &n, &wait))
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	err = ow_go_gpu_copy(p.device, p.stream, (void *)p.after, p.nafter / 8, dst, src, n, wait);
	Py_END_ALLOW_THREADS
	if (err != NULL)
		return ow_raise(err);
	Py_RETURN_NONE;
}
