// The module _core: gopy's functions and ours.
#include "ow.h"

#undef PyInit__core // the shim gave that name to gopy's own
PyObject *ow_gopy_init(void);

static PyMethodDef functions[] = {
	{"forked", ow_forked, METH_NOARGS, "forked()\n--\n\nWhether this is a forked child of the process that loaded this."},
	{"call", ow_call, METH_VARARGS, "call(verb, text)\n--\n\nSee overwire._engine."},
	{"job_wait", ow_job_wait, METH_VARARGS, "job_wait(job, timeout)\n--\n\nSee overwire._engine."},
	{"job_next", ow_job_next, METH_VARARGS, "job_next(job, timeout, raw)\n--\n\nSee overwire._engine."},
	{"job_take", ow_job_take, METH_VARARGS, "job_take(job, raw)\n--\n\nSee overwire._engine."},
	{"job_gather", ow_job_gather, METH_VARARGS, "job_gather(job, timeout, raw)\n--\n\nSee overwire._engine."},
	{"job_capsules", ow_job_capsules, METH_VARARGS, "job_capsules(job, raw)\n--\n\nSee overwire._engine."},
	{"model_table", ow_model_table, METH_O, "model_table(model)\n--\n\nSee overwire._engine."},
	{"load_start", ow_load_start, METH_VARARGS, "load_start(model, requests, options)\n--\n\nSee overwire._engine."},
	{"save_start", ow_save_start, METH_VARARGS, "save_start(spec, tensors)\n--\n\nSee overwire._engine."},
	{"codec_start", ow_codec_start, METH_VARARGS, "codec_start(spec, buffers)\n--\n\nSee overwire._engine."},
	{"codec_take", ow_codec_take, METH_O, "codec_take(job)\n--\n\nSee overwire._engine."},
	{"gpu_decode", ow_gpu_decode, METH_VARARGS, "gpu_decode(device, stream, after, kind, algorithm, streams)\n--\n\nSee overwire._engine."},
	{"gpu_encode", ow_gpu_encode, METH_VARARGS, "gpu_encode(device, stream, after, kind, version, contents, scratch, room)\n--\n\nSee overwire._engine."},
	{"gpu_peek", ow_gpu_peek, METH_VARARGS, "gpu_peek(device, stream, after, kind, algorithm, streams)\n--\n\nSee overwire._engine."},
	{"gpu_wait", ow_gpu_wait, METH_VARARGS, "gpu_wait(batch, wait)\n--\n\nSee overwire._engine."},
	{"gpu_alloc", ow_gpu_alloc, METH_VARARGS, "gpu_alloc(device, nbytes)\n--\n\nSee overwire._engine."},
	{"gpu_copy", ow_gpu_copy, METH_VARARGS, "gpu_copy(device, stream, after, dst, src, nbytes, wait)\n--\n\nSee overwire._engine."},
	{"codec_now", ow_codec_now, METH_VARARGS, "codec_now(spec, buffers)\n--\n\nSee overwire._engine."},
	{"buffer_of", ow_buffer_of, METH_VARARGS, "buffer_of(object, writable)\n--\n\nSee overwire._engine."},
	{"dlpack_take", ow_dlpack_take, METH_O, "dlpack_take(capsule)\n--\n\nSee overwire._engine."},
	{"dlpack_give", ow_dlpack_give, METH_VARARGS, "dlpack_give(owner, address, shape, strides, type, device)\n--\n\nSee overwire._engine."},
	{NULL, NULL, 0, NULL},
};

__attribute__((visibility("default"))) PyObject *PyInit__core(void)
{
	if (ow_fork_watch()) {
		PyErr_SetString(PyExc_ImportError, "overwire: cannot register with pthread_atfork");
		return NULL;
	}
	PyObject *m = ow_gopy_init();
	if (m != NULL && (PyModule_AddFunctions(m, functions) || ow_add_exporter(m))) {
		Py_DECREF(m);
		return NULL;
	}
	return m;
}
