// The module _core. Its rows say the types as Python has them: `make gen` writes
// python/overwire/_core.pyi out of them.
#include "ow.h"

// TYPE names a type, for the rows only.
#define TYPE(name, python)
// ROW is a function: its name, how Python calls it, its parameters, its result, and
// what it does.
#define ROW(name, flags, parameters, result, doc) {#name, ow_##name, flags, #name "(" parameters ") -> " result "\n\n" doc}

TYPE(Capsule, "Any") // opaque to this module
TYPE(Row, "tuple[str, str, tuple[int, ...], int, int, int, int]") // name, dtype, shape, bytes, stored bytes, source, alias or -1
TYPE(Result, "tuple[str, bytes, list[Capsule | None], list[Row] | None, Any]") // JSON or "", packed int64, tensors, a model's table, its handle
TYPE(DType, "tuple[int, int, int]") // code, bits, lanes
TYPE(Place, "tuple[int, int]") // device type, device

static PyMethodDef functions[] = {
	ROW(forked, METH_NOARGS, "", "bool", "Returns whether this is a forked child of the process that loaded the module."),
	ROW(setup, METH_VARARGS, "environment: str, job: type[int], model: type[int], /", "Result", "The settings."),
	ROW(call, METH_VARARGS, "verb: str, request: str, numbers: bytes, /", "Result", "Returns the result of a verb that does not wait."),
	ROW(run, METH_VARARGS, "verb: str, request: str, numbers: bytes, /", "Result", "Waits, and returns the result of a verb that waits."),
	ROW(start, METH_VARARGS, "verb: str, request: str, numbers: bytes, /", "Any", "Returns the job of a verb that waits."),
	ROW(wait, METH_VARARGS, "job: int, timeout: float | None, /", "bool", "Returns whether the job has ended; raises its error."),
	ROW(take, METH_VARARGS, "job: int, timeout: float | None, how: int, /", "Result | None", "Returns the result of a job, None on timeout."),
	ROW(free, METH_VARARGS, "handle: int, how: int, /", "None", "Forgets a job, a model or a batch."),
	ROW(buffer_of, METH_VARARGS, "object: Any, writable: bool, /", "tuple[int, int, Any]", "Returns (address, bytes, holder) of a buffer."),
	ROW(dlpack_take, METH_O, "capsule: Any, /", "tuple[int, tuple[int, ...], tuple[int, ...] | None, DType, Place, Any]", "Takes over a DLPack tensor."),
	ROW(dlpack_give, METH_VARARGS, "owner: Any, address: int, shape: tuple[int, ...], strides: tuple[int, ...], type: DType, device: Place, /", "Any", "Returns a new DLPack tensor."),
	{NULL, NULL, 0, NULL},
};

// Runs for every interpreter that imports the module. The engine keeps objects of one: handles that
// Python frees, the result types, who waits.
static int begin_module(PyObject *module)
{
	if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
		PyErr_SetString(PyExc_ImportError, "overwire: the engine serves a process's main interpreter, and this is "
			"another one (in mod_wsgi, WSGIApplicationGroup %{GLOBAL} runs a program in the main one)");
		return -1;
	}
	if (ow_fork_watch()) {
		PyErr_SetString(PyExc_ImportError, "overwire: cannot register with pthread_atfork");
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
