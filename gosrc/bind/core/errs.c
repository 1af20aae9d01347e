// Converts error texts from Go to the exceptions of overwire.errors, and raises an exception in forked children.
#include "ow.h"

// ow_raise_by raises the exception that a function of overwire.errors returns.
void ow_raise_by(const char *function, PyObject *argument)
{
	PyObject *errors = PyImport_ImportModule("overwire.errors");
	PyObject *f = errors != NULL ? PyObject_GetAttrString(errors, function) : NULL;
	PyObject *made = f != NULL ? PyObject_CallFunctionObjArgs(f, argument, NULL) : NULL;
	if (made != NULL)
		PyErr_SetObject((PyObject *)Py_TYPE(made), made);
	Py_XDECREF(made);
	Py_XDECREF(f);
	Py_XDECREF(errors);
}

PyObject *ow_raised(void)
{
	PyObject *kind, *value, *trace;

	PyErr_Fetch(&kind, &value, &trace);
	PyErr_NormalizeException(&kind, &value, &trace);
	ow_raise_by("of_engine", value);
	Py_XDECREF(kind);
	Py_XDECREF(value);
	Py_XDECREF(trace);
	return NULL;
}

int ow_child(void)
{
	if (!ow_fork_flag())
		return 0;
	ow_raise_by("forked", NULL);
	return 1;
}

PyObject *ow_forked(PyObject *self, PyObject *none)
{
	(void)self, (void)none;
	return PyBool_FromLong(ow_fork_flag());
}
