// The Python.h of this project: the stable ABI of CPython 3.10, so that one
// library serves 3.10 and later, and the few names outside of it that gopy's
// output mentions (and that nothing of ours reaches).
//
// This folder comes first on the include path.
#ifndef OW_SHIM_PYTHON_H
#define OW_SHIM_PYTHON_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include_next <Python.h>
#include <stdbool.h>

typedef struct {
	double real, imag;
} Py_complex;

static inline Py_complex PyComplex_AsCComplex(PyObject *o)
{
	Py_complex c = {PyComplex_RealAsDouble(o), PyComplex_ImagAsDouble(o)};
	return c;
}

#define PyMethod_Check(o) 0

// gopy's module is made under this name; module.c wraps it.
#define PyInit__core ow_gopy_init

#endif
