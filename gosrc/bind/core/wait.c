// Waits for jobs, in slices without the GIL, so that other threads can run and Ctrl-C takes effect after at most one
// slice.
#include "ow.h"

#include <math.h>
#include <time.h>

static const int64_t slice = 50 * 1000 * 1000, never = INT64_MAX;

static int64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int ow_deadline(PyObject *timeout, int64_t *deadline)
{
	*deadline = never;
	if (timeout == Py_None)
		return 0;
	double s = PyFloat_AsDouble(timeout);
	if (s == -1.0 && PyErr_Occurred())
		return -1;
	if (isnan(s)) {
		PyErr_SetString(PyExc_ValueError, "timeout is not a number");
		return -1;
	}
	if (s < 1e9) // more than 31 years means no limit
		*deadline = now() + (s > 0 ? (int64_t)(s * 1e9) : 0);
	return 0;
}

int64_t ow_slice(int64_t deadline)
{
	int64_t left = deadline == never ? slice : deadline - now();
	return left < 0 ? 0 : left < slice ? left : slice;
}

// wait(job, timeout) returns True if the job has ended, and False on timeout.
PyObject *ow_wait(PyObject *self, PyObject *args)
{
	PyObject *job, *timeout;
	uint64_t h;
	int64_t deadline;

	(void)self;
	if (ow_child() || !PyArg_UnpackTuple(args, "wait", 2, 2, &job, &timeout) || ow_handle(job, &h) ||
	    ow_deadline(timeout, &deadline))
		return NULL;
	for (;;) {
		int done = api_Wait(h, ow_slice(deadline));
		if (PyErr_Occurred())
			return ow_raised();
		if (done)
			Py_RETURN_TRUE;
		if (PyErr_CheckSignals())
			return NULL;
		if (ow_slice(deadline) == 0)
			Py_RETURN_FALSE;
	}
}

// take(job, timeout, how) returns the Result of a job, or None on timeout. See binding.Take.
PyObject *ow_take(PyObject *self, PyObject *args)
{
	PyObject *job, *timeout, *how;
	uint64_t h;
	int64_t deadline;

	(void)self;
	if (ow_child() || !PyArg_UnpackTuple(args, "take", 3, 3, &job, &timeout, &how) || ow_handle(job, &h) ||
	    ow_deadline(timeout, &deadline))
		return NULL;
	long n = PyLong_AsLong(how);
	if (n == -1 && PyErr_Occurred())
		return NULL;
	for (;;) {
		uint64_t made = api_Take(h, ow_slice(deadline), n);
		if (made != 0)
			return ow_result(made);
		if (PyErr_Occurred())
			return ow_raised();
		if (PyErr_CheckSignals())
			return NULL;
		if (ow_slice(deadline) == 0)
			Py_RETURN_NONE;
	}
}
