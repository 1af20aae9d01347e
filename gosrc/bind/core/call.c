// Calls of verbs that may wait: one text in, one out, and Ctrl-C in between.
#include "_cgo_export.h"
#include "ow.h"

#include <stdlib.h>

// ended waits in slices; 0: it has ended without an error. With -1 there is an
// exception: the verb's, or a signal handler's.
static int ended(uint64_t job)
{
	for (;;) {
		int64_t ns = ow_slice(INT64_MAX);
		int done = 0;
		char *err;
		Py_BEGIN_ALLOW_THREADS
		err = ow_go_wait(job, ns, &done);
		Py_END_ALLOW_THREADS
		if (err != NULL) {
			ow_raise(err);
			return -1;
		}
		// Also when it is done: else the exception would come when the result, a
		// handle perhaps, is Python's and in no variable yet.
		if (PyErr_CheckSignals())
			return -1;
		if (done)
			return 0;
	}
}

// call(verb, text): the text that the verb gives. After an exception nothing of it
// is left, and nothing of the caller's is in use.
PyObject *ow_call(PyObject *self, PyObject *args)
{
	PyObject *verb, *text;
	Py_ssize_t verb_len, text_len;
	uint64_t job = 0;
	char *err, *found = NULL;
	int64_t n = 0;

	(void)self;
	if (ow_child() || !PyArg_UnpackTuple(args, "call", 2, 2, &verb, &text))
		return NULL;
	const char *v = ow_text(verb, &verb_len), *t = v != NULL ? ow_text(text, &text_len) : NULL;
	if (t == NULL)
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	err = ow_go_begin((char *)v, verb_len, (char *)t, text_len, &job);
	Py_END_ALLOW_THREADS
	if (err != NULL)
		return ow_raise(err);
	if (ended(job)) {
		PyObject *kind, *value, *trace;
		PyErr_Fetch(&kind, &value, &trace);
		Py_BEGIN_ALLOW_THREADS
		ow_go_abandon(job);
		Py_END_ALLOW_THREADS
		PyErr_Restore(kind, value, trace);
		return NULL;
	}
	err = ow_go_result(job, &found, &n);
	if (err != NULL)
		return ow_raise(err);
	PyObject *out = PyUnicode_FromStringAndSize(found, (Py_ssize_t)n);
	free(found);
	return out;
}
