// Declares the C part of this package. The structures are those of DLPack (dmlc/dlpack, the ABI of version 0.x, which
// every consumer supports), with other names.
#ifndef OW_MANAGED_H
#define OW_MANAGED_H

#include <stdint.h>

struct ow_device {
	int32_t type; // 1 for CPU, 2 for CUDA
	int32_t id;
};

struct ow_type {
	uint8_t code, bits;
	uint16_t lanes;
};

struct ow_tensor {
	void *data;
	struct ow_device device;
	int32_t ndim;
	struct ow_type type;
	int64_t *shape, *strides;
	uint64_t byte_offset;
};

struct ow_managed { // DLManagedTensor
	struct ow_tensor t;
	void *context;
	void (*deleter)(struct ow_managed *);
};

// ow_block has the layout of device.Block. A test compares them.
struct ow_block {
	int64_t refs;
	void *base;
	uint64_t length;
	int64_t kind;
};

enum { OW_KIND_MAP = 0, OW_KIND_REGION = 1, OW_KIND_CUDA = 2, OW_KIND_ARENA = 3 };

// ow_listed has the layout of device.Listed, a block of kind OW_KIND_CUDA or OW_KIND_ARENA.
struct ow_listed {
	struct ow_block block;
	struct ow_listed *next, **list;
};

struct ow_free_list { // layout of device.FreeList
	struct ow_listed *head;
	int64_t room;
};

struct ow_wanted { // a tensor to describe
	uint64_t data;  // address of its bytes, dense in C order
	uint64_t block; // address of its block; 0 for memory that is never freed
	int64_t bytes;
	struct ow_type type;
	int32_t ndim, cuda; // cuda is 0 on the CPU, otherwise 1 + the CUDA device
	uint64_t managed;   // address of the result
};

// ow_managed_many creates n managed tensors and takes over a reference to each block. dims holds their concatenated
// shapes. It returns the number of created tensors. That is fewer than n if memory runs out, and then the caller still
// owns all references.
int64_t ow_managed_many(struct ow_wanted *all, int64_t n, const int64_t *dims);

// ow_managed_forget frees a managed tensor without its reference, which the caller still owns.
void ow_managed_forget(uint64_t managed);

// ow_managed_delete calls the deleter, as a consumer does.
void ow_managed_delete(void *m);

// ow_block_release releases a reference to block. [data, data+n) belonged to the holder.
void ow_block_release(struct ow_block *block, void *data, int64_t n);

// ow_fork_watch registers the handler that sets ow_fork_flag in children of this process. It does so only once.
int ow_fork_watch(void);
int ow_fork_flag(void);

#endif
