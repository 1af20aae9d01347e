// Capsules: a DLManagedTensor as Python holds it, by DLPack's protocol.
#include "ow.h"

static const char fresh[] = "dltensor";

// A consumer renames the capsule when it takes the tensor; only one that was not
// taken still has the first name and frees its tensor.
static void destroy(PyObject *capsule)
{
	if (PyCapsule_IsValid(capsule, fresh))
		ow_managed_delete(PyCapsule_GetPointer(capsule, fresh));
}

PyObject *ow_capsule(void *managed)
{
	PyObject *c = PyCapsule_New(managed, fresh, destroy);
	if (c == NULL)
		ow_managed_delete(managed);
	return c;
}
