// Defines the module _core. Its rows give the Python types, from which `make gen` writes python/overwire/_core.pyi.
#include "ow.h"

// TYPE names a type that the rows use.
#define TYPE(name, python)
// ROW is a function: its name, calling convention, parameters, result, and docstring.
#define ROW(name, flags, parameters, result, doc) {#name, ow_##name, flags, #name "(" parameters ") -> " result "\n\n" doc}

TYPE(Capsule, "Any") // opaque to this module
TYPE(Row, "tuple[str, str, tuple[int, ...], int, int, int, int]") // name, dtype, shape, bytes, stored bytes, source, alias or -1
TYPE(Result, "tuple[str, bytes, list[Capsule | None], list[Row] | None, Any]") // JSON or "", packed int64, tensors, table and handle of a model
TYPE(DType, "tuple[int, int, int]") // code, bits, lanes
TYPE(Place, "tuple[int, int]") // device type, device

static PyMethodDef functions[] = {
	ROW(forked, METH_NOARGS, "", "bool", "Returns whether this is a forked child of the process that loaded the module."),
	ROW(setup, METH_VARARGS, "environment: str, job: type[int], model: type[int], /", "Result", "Applies the environment and returns the settings."),
	ROW(call, METH_VARARGS, "verb: str, request: str, numbers: bytes, /", "Result", "Returns the result of a verb that does not wait."),
	ROW(run, METH_VARARGS, "verb: str, request: str, numbers: bytes, /", "Result", "Waits for a verb and returns its result."),
	ROW(start, METH_VARARGS, "verb: str, request: str, numbers: bytes, /", "Any", "Starts a verb that waits and returns its job."),
	ROW(wait, METH_VARARGS, "job: int, timeout: float | None, /", "bool", "Returns whether the job has ended, or raises its error."),
	ROW(take, METH_VARARGS, "job: int, timeout: float | None, how: int, /", "Result | None", "Returns the result of a job, or None on timeout."),
	ROW(free, METH_VARARGS, "handle: int, how: int, /", "None", "Frees the handle of a job, a model or a batch."),
	ROW(buffer_of, METH_VARARGS, "object: Any, writable: bool, /", "tuple[int, int, Any]", "Returns (address, bytes, holder) of a buffer."),
	ROW(dlpack_take, METH_O, "capsule: Any, /", "tuple[int, tuple[int, ...], tuple[int, ...] | None, DType, Place, Any]", "Takes over a DLPack tensor and returns its description."),
	ROW(dlpack_give, METH_VARARGS, "owner: Any, address: int, shape: tuple[int, ...], strides: tuple[int, ...], type: DType, device: Place, /", "Any", "Returns a new DLPack tensor."),
	{NULL, NULL, 0, NULL},
};

// begin_module runs for every interpreter that imports the module. The engine's state belongs to one interpreter:
// handles that Python frees, result types, and waiting threads.
static int begin_module(PyObject *module)
{
	if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
		PyErr_SetString(PyExc_ImportError, "overwire: the engine works only in the main interpreter of a process, and "
			"this is another interpreter (in mod_wsgi, use WSGIApplicationGroup %{GLOBAL})");
		return -1;
	}
	if (ow_fork_watch()) {
		PyErr_SetString(PyExc_ImportError, "overwire: cannot register a handler with pthread_atfork");
		return -1;
	}
	return ow_add_exporter(module);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, begin_module}, {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_core", NULL, 0, functions, slots, NULL, NULL, NULL};

__attribute__((visibility("default"))) PyObject *PyInit__core(void)
{
	return PyModuleDef_Init(&definition);
}
