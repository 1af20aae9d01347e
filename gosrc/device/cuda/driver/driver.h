// Declares the CUDA driver API as a table of functions.
//
// The engine is not linked against CUDA. The table is filled with dlopen and dlsym at first use, or by the fake
// driver of cudatest in tests. Types are declared here and not taken from cuda.h, so that the engine can be built
// everywhere. They are part of the driver's ABI, which has been stable since CUDA 4.
#ifndef OWCU_DRIVER_H
#define OWCU_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef int owcu_result;   // CUresult
typedef uint64_t owcu_ptr; // CUdeviceptr
typedef void *owcu_handle; // CUcontext, CUstream, CUevent, CUmodule, CUfunction

enum {
	OWCU_OUT_OF_MEMORY = 2,
	OWCU_NOT_READY = 600,
	OWCU_IMPLICIT = 906, // the call uses the legacy stream while a stream that it waits for is being captured
	// Codes of the engine: for a call in a forked child, and for work on a stream that is being captured into a graph.
	OWCU_FORKED = -2,
	OWCU_CAPTURED = -3,
};

// owcu_ipc is a handle with which another process of this host maps an allocation (CUipcMemHandle).
struct owcu_ipc {
	char bytes[64];
};

// X(field, symbol, arguments). Symbols include the version that has this signature. Calls that synchronize the whole
// context are excluded. Synchronous copies are also excluded, because they destroy any graph capture in progress on
// any thread, and wait for other work.
#define OWCU_FUNCTIONS(X)                                                                                              \
	X(init, "cuInit", (unsigned flags))                                                                            \
	X(driver_version, "cuDriverGetVersion", (int *version))                                                        \
	X(device_count, "cuDeviceGetCount", (int *n))                                                                  \
	X(device_get, "cuDeviceGet", (int *device, int ordinal))                                                       \
	X(device_name, "cuDeviceGetName", (char *name, int n, int device))                                             \
	X(device_attribute, "cuDeviceGetAttribute", (int *value, int attribute, int device))                           \
	X(device_memory, "cuDeviceTotalMem_v2", (size_t *n, int device))                                               \
	X(device_bus, "cuDeviceGetPCIBusId", (char *id, int n, int device))                                            \
	X(ctx_retain, "cuDevicePrimaryCtxRetain", (owcu_handle *ctx, int device))                                      \
	X(ctx_release, "cuDevicePrimaryCtxRelease_v2", (int device))                                                   \
	X(ctx_get, "cuCtxGetCurrent", (owcu_handle *ctx))                                                              \
	X(ctx_set, "cuCtxSetCurrent", (owcu_handle ctx))                                                               \
	X(thread_mode, "cuThreadExchangeStreamCaptureMode", (int *mode))                                               \
	X(mem_alloc, "cuMemAlloc_v2", (owcu_ptr *p, size_t n))                                                         \
	X(mem_free, "cuMemFree_v2", (owcu_ptr p))                                                                      \
	X(mem_info, "cuMemGetInfo_v2", (size_t *unused, size_t *total))                                                \
	X(ipc_get, "cuIpcGetMemHandle", (struct owcu_ipc *handle, owcu_ptr p))                                         \
	X(ipc_open, "cuIpcOpenMemHandle_v2", (owcu_ptr *p, struct owcu_ipc handle, unsigned flags))                    \
	X(ipc_close, "cuIpcCloseMemHandle", (owcu_ptr p))                                                              \
	X(host_register, "cuMemHostRegister_v2", (void *p, size_t n, unsigned flags))                                  \
	X(host_unregister, "cuMemHostUnregister", (void *p))                                                           \
	X(host_pointer, "cuMemHostGetDevicePointer_v2", (owcu_ptr *p, void *host, unsigned flags))                     \
	X(copy_in, "cuMemcpyHtoDAsync_v2", (owcu_ptr dst, const void *src, size_t n, owcu_handle stream))              \
	X(copy_out_async, "cuMemcpyDtoHAsync_v2", (void *dst, owcu_ptr src, size_t n, owcu_handle stream))             \
	X(copy_any, "cuMemcpyAsync", (owcu_ptr dst, owcu_ptr src, size_t n, owcu_handle stream))                       \
	X(pointer_attribute, "cuPointerGetAttribute", (void *value, int attribute, owcu_ptr p))                        \
	X(stream_ctx, "cuStreamGetCtx", (owcu_handle stream, owcu_handle *ctx))                                        \
	X(stream_create, "cuStreamCreate", (owcu_handle *stream, unsigned flags))                                      \
	X(stream_destroy, "cuStreamDestroy_v2", (owcu_handle stream))                                                  \
	X(stream_sync, "cuStreamSynchronize", (owcu_handle stream))                                                    \
	X(stream_wait, "cuStreamWaitEvent", (owcu_handle stream, owcu_handle event, unsigned flags))                   \
	X(stream_capturing, "cuStreamIsCapturing", (owcu_handle stream, int *status))                                  \
	X(event_create, "cuEventCreate", (owcu_handle *event, unsigned flags))                                         \
	X(event_record, "cuEventRecord", (owcu_handle event, owcu_handle stream))                                      \
	X(event_query, "cuEventQuery", (owcu_handle event))                                                            \
	X(event_sync, "cuEventSynchronize", (owcu_handle event))                                                       \
	X(event_elapsed, "cuEventElapsedTime", (float *ms, owcu_handle begin, owcu_handle end))                        \
	X(event_destroy, "cuEventDestroy_v2", (owcu_handle event))                                                     \
	X(module_load, "cuModuleLoadData", (owcu_handle *module, const void *image))                                   \
	X(module_unload, "cuModuleUnload", (owcu_handle module))                                                       \
	X(module_function, "cuModuleGetFunction", (owcu_handle *function, owcu_handle module, const char *name))       \
	X(launch, "cuLaunchKernel",                                                                                    \
	  (owcu_handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,         \
	   unsigned shared, owcu_handle stream, void **args, void **extra))                                            \
	X(error_name, "cuGetErrorName", (owcu_result r, const char **s))                                               \
	X(error_text, "cuGetErrorString", (owcu_result r, const char **s))

struct owcu_api {
#define OWCU_FIELD(field, symbol, args) owcu_result(*field) args;
	OWCU_FUNCTIONS(OWCU_FIELD)
#undef OWCU_FIELD
};

// owcu is the table in use. It is NULL until owcu_load_driver or owcu_use_table is called.
extern const struct owcu_api *owcu;

// owcu_load_driver fills the table from a shared library. It returns 0, or -1 with
// the reason in why. It may be called again after a failure.
int owcu_load_driver(const char *library, char *why, size_t n);

// owcu_use_table installs another table, such as that of the fake driver. NULL removes it.
void owcu_use_table(const struct owcu_api *api);

// owcu_forked reports whether this process is a child of the process that loaded the
// table. The driver cannot be used there, not even to free resources.
int owcu_forked(void);

#endif
