// The module _core: gopy's functions and ours.
#include "ow.h"

#undef PyInit__core // the shim gave that name to gopy's own
PyObject *ow_gopy_init(void);

static PyMethodDef functions[] = {
	{"forked", ow_forked, METH_NOARGS, "forked()\n--\n\nWhether this is a forked child of the process that loaded this."},
	{"job_wait", ow_job_wait, METH_VARARGS, "job_wait(job, timeout)\n--\n\nSee overwire._engine."},
	{"job_next", ow_job_next, METH_VARARGS, "job_next(job, timeout, raw)\n--\n\nSee overwire._engine."},
	{"job_take", ow_job_take, METH_VARARGS, "job_take(job, raw)\n--\n\nSee overwire._engine."},
	{"model_table", ow_model_table, METH_O, "model_table(model)\n--\n\nSee overwire._engine."},
	{"load_start", ow_load_start, METH_VARARGS, "load_start(model, requests, options)\n--\n\nSee overwire._engine."},
	{"save_start", ow_save_start, METH_VARARGS, "save_start(spec, tensors)\n--\n\nSee overwire._engine."},
	{NULL, NULL, 0, NULL},
};

__attribute__((visibility("default"))) PyObject *PyInit__core(void)
{
	if (ow_fork_watch()) {
		PyErr_SetString(PyExc_ImportError, "overwire: cannot register with pthread_atfork");
		return NULL;
	}
	PyObject *m = ow_gopy_init();
	if (m != NULL && PyModule_AddFunctions(m, functions)) {
		Py_DECREF(m);
		return NULL;
	}
	return m;
}
