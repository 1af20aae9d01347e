// Shares memory with other Python objects without copying it, as buffers and DLPack capsules. No Go code runs here, so
// that everything works in forked children and while the interpreter exits.
#include "ow.h"
#include "../../dlpack/managed.h"

#include <stdlib.h>
#include <string.h>

// The limited API of 3.10 does not declare the buffer protocol, which is in the stable
// ABI from 3.11 on. Version 3.10 has the same layout and functions.
struct ow_view {
	void *buf;
	PyObject *obj;
	Py_ssize_t len, itemsize;
	int readonly, ndim;
	char *format;
	Py_ssize_t *shape, *strides, *suboffsets;
	void *internal;
};
int PyObject_GetBuffer(PyObject *o, struct ow_view *view, int flags);
void PyBuffer_Release(struct ow_view *view);

enum { view_writable = 0x1, view_contiguous = 0x38, slot_getbuffer = 1 }; // PyBUF_WRITABLE, PyBUF_C_CONTIGUOUS, Py_bf_getbuffer

static const char held[] = "overwire.held";

static void release_view(PyObject *capsule)
{
	struct ow_view *v = PyCapsule_GetPointer(capsule, held);
	PyBuffer_Release(v);
	free(v);
}

// buffer_of(object, writable) returns (address, bytes, holder). The memory is valid while
// the holder lives. Objects without a suitable buffer raise BufferError or TypeError.
PyObject *ow_buffer_of(PyObject *self, PyObject *args)
{
	PyObject *o, *writable;

	(void)self;
	if (!PyArg_UnpackTuple(args, "buffer_of", 2, 2, &o, &writable))
		return NULL;
	int write = PyObject_IsTrue(writable);
	struct ow_view *v = calloc(1, sizeof *v);
	if (v == NULL || write < 0) {
		free(v);
		return write < 0 ? NULL : PyErr_NoMemory();
	}
	if (PyObject_GetBuffer(o, v, view_contiguous | (write ? view_writable : 0))) {
		free(v);
		return NULL;
	}
	PyObject *holder = PyCapsule_New(v, held, release_view);
	if (holder == NULL) {
		PyBuffer_Release(v);
		free(v);
		return NULL;
	}
	return Py_BuildValue("(KnN)", (unsigned long long)(uintptr_t)v->buf, v->len, holder);
}

// Exporter is a base class of buffers. A subclass has a method _buffer(), which returns an object with the buffer
// protocol.
static int getbuffer(PyObject *self, struct ow_view *view, int flags)
{
	view->obj = NULL;
	PyObject *method = PyObject_GetAttrString(self, "_buffer");
	PyObject *o = method != NULL ? PyObject_CallObject(method, NULL) : NULL;
	Py_XDECREF(method);
	if (o == NULL)
		return -1;
	int r = PyObject_GetBuffer(o, view, flags); // keeps the memory alive
	Py_DECREF(o);
	return r;
}

static PyType_Slot exporter_slots[] = {
	{slot_getbuffer, getbuffer},
	{Py_tp_doc, "A base class of buffers. Its memory is the buffer that the method _buffer() returns."},
	{0, NULL},
};

static PyType_Spec exporter = {"overwire._core.Exporter", 0, 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, exporter_slots};

int ow_add_exporter(PyObject *module)
{
	PyObject *type = PyType_FromSpec(&exporter);
	if (type == NULL)
		return -1;
	int r = PyObject_SetAttrString(module, "Exporter", type);
	Py_DECREF(type);
	return r;
}

// The DLPack structures are in gosrc/dlpack/managed.h.

static const char fresh[] = "dltensor", used[] = "used_dltensor";

// A consumer renames the capsule when it takes the tensor. A capsule that still has the first name was
// not consumed and frees its tensor.
static void destroy(PyObject *capsule)
{
	if (PyCapsule_IsValid(capsule, fresh))
		ow_managed_delete(PyCapsule_GetPointer(capsule, fresh));
}

PyObject *ow_capsule(void *managed)
{
	PyObject *c = PyCapsule_New(managed, fresh, destroy);
	if (c == NULL)
		ow_managed_delete(managed);
	return c;
}

static void release_managed(PyObject *capsule)
{
	struct ow_managed *m = PyCapsule_GetPointer(capsule, held);
	if (m->deleter != NULL) // the protocol allows a missing deleter
		m->deleter(m);
}

// dlpack_take(capsule) returns (address, shape, strides in elements or None, (code, bits, lanes), (device type,
// device), holder). It consumes the capsule. The tensor is valid while the holder lives.
PyObject *ow_dlpack_take(PyObject *self, PyObject *capsule)
{
	(void)self;
	if (!PyCapsule_IsValid(capsule, fresh)) {
		PyErr_SetString(PyExc_ValueError, "expected a DLPack capsule that has not been consumed");
		return NULL;
	}
	struct ow_managed *m = PyCapsule_GetPointer(capsule, fresh);
	if (m->t.ndim < 0) {
		PyErr_SetString(PyExc_ValueError, "the DLPack tensor has a negative rank");
		return NULL;
	}
	PyObject *shape = ow_tuple(m->t.shape, m->t.ndim);
	PyObject *strides = m->t.strides != NULL ? ow_tuple(m->t.strides, m->t.ndim) : Py_NewRef(Py_None);
	PyObject *holder = shape && strides ? PyCapsule_New(m, held, release_managed) : NULL;
	if (holder == NULL || PyCapsule_SetName(capsule, used)) {
		if (holder != NULL)
			PyCapsule_SetDestructor(holder, NULL);
		Py_XDECREF(holder);
		Py_XDECREF(shape);
		Py_XDECREF(strides);
		return NULL;
	}
	return Py_BuildValue("(KNN(iii)(ii)N)", (unsigned long long)((uintptr_t)m->t.data + m->t.byte_offset), shape, strides,
	                     (int)m->t.type.code, (int)m->t.type.bits, (int)m->t.type.lanes, (int)m->t.device.type,
	                     (int)m->t.device.id, holder);
}

// view is a tensor that is a view of a Python object's memory.
struct view {
	struct ow_managed m;
	int64_t dims[]; // shape, then strides
};

static void give_back(struct ow_managed *m)
{
	// The last consumer may release the tensor on any thread, or after the interpreter has ended.
	if (Py_IsInitialized()) {
		PyGILState_STATE s = PyGILState_Ensure();
		Py_DECREF((PyObject *)m->context);
		PyGILState_Release(s);
	}
	free(m);
}

// dlpack_give(owner, address, shape, strides in elements, (code, bits, lanes),
// (device type, device)) returns a new capsule that keeps owner alive.
PyObject *ow_dlpack_give(PyObject *self, PyObject *args)
{
	PyObject *owner, *shape, *strides;
	unsigned long long address;
	int code, bits, lanes, kind, id;

	(void)self;
	if (!PyArg_ParseTuple(args, "OKOO(iii)(ii)", &owner, &address, &shape, &strides, &code, &bits, &lanes, &kind, &id))
		return NULL;
	if (!PyTuple_Check(shape) || !PyTuple_Check(strides) || PyTuple_Size(shape) != PyTuple_Size(strides)) {
		PyErr_SetString(PyExc_TypeError, "expected shape and strides as tuples of equal length");
		return NULL;
	}
	Py_ssize_t n = PyTuple_Size(shape);
	struct view *l = calloc(1, sizeof *l + 2 * sizeof(int64_t) * (size_t)n);
	if (l == NULL)
		return PyErr_NoMemory();
	for (Py_ssize_t i = 0; i < n; i++) {
		l->dims[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
		l->dims[n + i] = PyLong_AsLongLong(PyTuple_GetItem(strides, i));
	}
	if (PyErr_Occurred()) {
		free(l);
		return NULL;
	}
	Py_INCREF(owner);
	l->m = (struct ow_managed){
		.t = {.data = (void *)(uintptr_t)address, .device = {kind, id}, .ndim = (int32_t)n,
		      .type = {(uint8_t)code, (uint8_t)bits, (uint16_t)lanes}, .shape = l->dims, .strides = l->dims + n},
		.context = owner,
		.deleter = give_back,
	};
	return ow_capsule(&l->m);
}
