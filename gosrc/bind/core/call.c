// Passes requests to Go, and returns results or jobs. A request is a text, and numbers that are native int64 values
// packed in bytes.
#include "ow.h"

#include <string.h>

static PyObject *kinds[2]; // the classes passed to setup

int ow_handle(PyObject *o, uint64_t *h)
{
	int64_t n = PyLong_Check(o) && !PyBool_Check(o) ? PyLong_AsLongLong(o) : 0;
	*h = (uint64_t)n;
	if (n > 0)
		return 0;
	PyErr_Clear();
	ow_raise_by("not_a_handle", o);
	return -1;
}

void ow_forget(uint64_t handle, int how)
{
	PyObject *kind, *value, *trace;

	PyErr_Fetch(&kind, &value, &trace);
	api_Free(handle, how);
	PyErr_Clear(); // ignore the exception of an engine that has failed
	PyErr_Restore(kind, value, trace);
}

PyObject *ow_handle_of(int kind, uint64_t handle)
{
	// The class runs no Python code, so that no signal handler can run before the number has an owner.
	PyObject *number = PyLong_FromUnsignedLongLong(handle), *o = NULL;
	if (number != NULL)
		o = PyObject_CallFunctionObjArgs(kinds[kind], number, NULL);
	Py_XDECREF(number);
	if (o == NULL)
		ow_forget(handle, free_ended);
	return o;
}

struct request {
	const char *verb, *text, *numbers;
	int64_t count;
};

static const char *text_of(PyObject *o)
{
	Py_ssize_t n;
	const char *s = PyUnicode_AsUTF8AndSize(o, &n);
	if (s != NULL && memchr(s, 0, (size_t)n) != NULL) {
		PyErr_SetString(PyExc_ValueError, "embedded null character");
		return NULL;
	}
	return s;
}

// request_of reads (verb, text, numbers). The tuple keeps them alive.
static int request_of(PyObject *args, const char *name, struct request *r)
{
	PyObject *verb, *text, *numbers;
	char *packed;
	Py_ssize_t n;

	if (ow_child() || !PyArg_UnpackTuple(args, name, 3, 3, &verb, &text, &numbers))
		return -1;
	if ((r->verb = text_of(verb)) == NULL || (r->text = text_of(text)) == NULL || PyBytes_AsStringAndSize(numbers, &packed, &n))
		return -1;
	if (n % 8) {
		PyErr_SetString(PyExc_ValueError, "the packed numbers have a wrong length");
		return -1;
	}
	r->numbers = packed;
	r->count = n / 8;
	return 0;
}

static uint64_t started(struct request *r)
{
	return api_Start((char *)r->verb, (char *)r->text, (uintptr_t)r->numbers, r->count);
}

// setup(environment, Job, Model) returns a Result with the settings. Job and Model are the classes of
// numbers that own a job and a model.
PyObject *ow_setup(PyObject *self, PyObject *args)
{
	PyObject *text, *job, *model;

	(void)self;
	if (ow_child() || !PyArg_UnpackTuple(args, "setup", 3, 3, &text, &job, &model))
		return NULL;
	const char *env = text_of(text);
	if (env == NULL)
		return NULL;
	Py_INCREF(job);
	Py_INCREF(model);
	kinds[kind_job] = job;
	kinds[kind_model] = model;
	uint64_t made = api_Setup((char *)env);
	return made != 0 ? ow_result(made) : ow_raised();
}

// call(verb, text, numbers) returns the Result of a verb that does not wait.
PyObject *ow_call(PyObject *self, PyObject *args)
{
	struct request r;

	(void)self;
	if (request_of(args, "call", &r))
		return NULL;
	uint64_t made = api_Call((char *)r.verb, (char *)r.text, (uintptr_t)r.numbers, r.count);
	return made != 0 ? ow_result(made) : ow_raised();
}

// start(verb, text, numbers) returns the Job of a verb that waits.
PyObject *ow_start(PyObject *self, PyObject *args)
{
	struct request r;

	(void)self;
	if (request_of(args, "start", &r))
		return NULL;
	uint64_t job = started(&r);
	return job != 0 ? ow_handle_of(kind_job, job) : ow_raised();
}

// ended waits in slices. It returns 0 if the job has ended without an error, or -1 with an exception of the verb or a
// signal handler.
static int ended(uint64_t job)
{
	for (;;) {
		int done = api_Wait(job, ow_slice(INT64_MAX));
		if (PyErr_Occurred()) {
			ow_raised();
			return -1;
		}
		// Check signals even if the job has ended. Otherwise the exception could be raised when
		// Python has not yet stored the result, which may own a handle, in a variable.
		if (PyErr_CheckSignals())
			return -1;
		if (done)
			return 0;
	}
}

// run(verb, text, numbers) waits for a verb and returns its Result. After an exception its result has been freed, and
// the caller's memory is not in use.
PyObject *ow_run(PyObject *self, PyObject *args)
{
	enum { last = 4 }; // binding.TakeLast
	struct request r;

	(void)self;
	if (request_of(args, "run", &r))
		return NULL;
	uint64_t job = started(&r);
	if (job == 0)
		return ow_raised();
	if (ended(job)) {
		ow_forget(job, free_called);
		return NULL;
	}
	uint64_t made = api_Take(job, 0, last);
	return made != 0 ? ow_result(made) : ow_raised();
}

// free(handle, how) frees a handle. See binding.Free.
PyObject *ow_free(PyObject *self, PyObject *args)
{
	PyObject *handle, *how;
	uint64_t h;

	(void)self;
	if (ow_child() || !PyArg_UnpackTuple(args, "free", 2, 2, &handle, &how) || ow_handle(handle, &h))
		return NULL;
	long n = PyLong_AsLong(how);
	if (n == -1 && PyErr_Occurred())
		return NULL;
	api_Free(h, n);
	if (PyErr_Occurred())
		return ow_raised();
	Py_RETURN_NONE;
}
