// Arguments: what Python passes, checked before Go sees it.
#include "ow.h"

#include <string.h>

int ow_handle(PyObject *o, uint64_t *h)
{
	*h = PyLong_AsUnsignedLongLong(o);
	return *h == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

const char *ow_text(PyObject *o, Py_ssize_t *n)
{
	const char *s = PyUnicode_AsUTF8AndSize(o, n);
	if (s != NULL && memchr(s, 0, (size_t)*n) != NULL) {
		PyErr_SetString(PyExc_ValueError, "embedded null character");
		return NULL;
	}
	return s;
}
