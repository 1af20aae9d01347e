// The module _core.
#include "ow.h"

static PyMethodDef functions[] = {
	{"forked", ow_forked, METH_NOARGS, "forked()\n--\n\nWhether this is a forked child of the process that loaded this."},
	{"setup", ow_setup, METH_VARARGS, "setup(environment, Job, Model)\n--\n\nThe settings: a Result."},
	{"call", ow_call, METH_VARARGS, "call(verb, request, numbers)\n--\n\nThe Result of a verb that does not wait."},
	{"run", ow_run, METH_VARARGS, "run(verb, request, numbers)\n--\n\nThe Result of a verb that waits, at its end."},
	{"start", ow_start, METH_VARARGS, "start(verb, request, numbers)\n--\n\nThe Job of a verb that waits."},
	{"wait", ow_wait, METH_VARARGS, "wait(job, timeout)\n--\n\nWhether the job has ended; raises its error."},
	{"take", ow_take, METH_VARARGS, "take(job, timeout, how)\n--\n\nThe Result of a job, None when time is up."},
	{"free", ow_free_handle, METH_VARARGS, "free(handle, how)\n--\n\nForget a job, a model or a batch."},
	{"buffer_of", ow_buffer_of, METH_VARARGS, "buffer_of(object, writable)\n--\n\n(address, bytes, holder) of a buffer."},
	{"dlpack_take", ow_dlpack_take, METH_O, "dlpack_take(capsule)\n--\n\nTake over a DLPack tensor."},
	{"dlpack_give", ow_dlpack_give, METH_VARARGS, "dlpack_give(owner, address, shape, strides, type, device)\n--\n\nA new DLPack tensor."},
	{NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_core", NULL, -1, functions, NULL, NULL, NULL, NULL};

__attribute__((visibility("default"))) PyObject *PyInit__core(void)
{
	if (ow_fork_watch()) {
		PyErr_SetString(PyExc_ImportError, "overwire: cannot register with pthread_atfork");
		return NULL;
	}
	PyObject *m = PyModule_Create(&definition);
	if (m != NULL && ow_add_exporter(m)) {
		Py_DECREF(m);
		return NULL;
	}
	return m;
}
