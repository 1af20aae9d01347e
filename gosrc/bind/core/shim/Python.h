// Selects the stable ABI of CPython 3.10, so that one library works with 3.10 and later.
//
// This folder must come first on the include path.
#ifndef OW_SHIM_PYTHON_H
#define OW_SHIM_PYTHON_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include_next <Python.h>

#endif
