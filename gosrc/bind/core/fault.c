// Errors: texts from Go become RuntimeError, which overwire._engine turns into
// the exception that the text names; and the refusal in forked children.
#include "ow.h"

#include <stdlib.h>

PyObject *ow_raise(char *text)
{
	PyErr_SetString(PyExc_RuntimeError, text);
	free(text);
	return NULL;
}

int ow_child(void)
{
	if (!ow_fork_flag())
		return 0;
	PyErr_SetString(PyExc_RuntimeError,
	                "overwire-fault:{\"class\":\"ForkedError\",\"message\":\"overwire: this process was forked from one "
	                "that had started the engine; use the spawn or forkserver start method\"}");
	return 1;
}

PyObject *ow_forked(PyObject *self, PyObject *none)
{
	(void)self, (void)none;
	return PyBool_FromLong(ow_fork_flag());
}
