// Converts a result from Go to a tuple (text, numbers, capsules, rows, model), and frees the original.
#include "ow.h"
#include "../api/result.h"

#include <stdlib.h>

// capsules_of takes over the tensors and returns a list of capsules, with None for missing tensors.
static PyObject *capsules_of(struct ow_result *r)
{
	PyObject *list = PyList_New((Py_ssize_t)r->tensors);
	for (int64_t i = 0; i < r->tensors; i++) {
		if (list == NULL) { // out of memory: free the remaining tensors
			if (r->managed[i] != NULL)
				ow_managed_delete(r->managed[i]);
			continue;
		}
		PyObject *capsule = r->managed[i] != NULL ? ow_capsule(r->managed[i]) : Py_NewRef(Py_None);
		if (capsule == NULL)
			Py_CLEAR(list);
		else
			PyList_SetItem(list, (Py_ssize_t)i, capsule);
	}
	return list;
}

PyObject *ow_result(uint64_t address)
{
	struct ow_result *r = (struct ow_result *)(uintptr_t)address;
	PyObject *fields[5] = {
		PyUnicode_DecodeUTF8(r->text != NULL ? r->text : "", (Py_ssize_t)r->text_len, NULL),
		PyBytes_FromStringAndSize((char *)r->numbers, (Py_ssize_t)(8 * r->count)),
		capsules_of(r),
		r->table != NULL ? ow_rows(r->table) : Py_NewRef(Py_None),
		r->model != 0 ? ow_handle_of(kind_model, r->model) : Py_NewRef(Py_None),
	};
	free(r->text);
	free(r->numbers);
	free(r->managed);
	free(r->table);
	free(r);
	PyObject *made = PyTuple_New(5);
	for (int i = 0; i < 5; i++) {
		if (made != NULL && fields[i] != NULL)
			PyTuple_SetItem(made, i, fields[i]);
		else {
			Py_XDECREF(fields[i]);
			Py_CLEAR(made);
		}
	}
	return made;
}
