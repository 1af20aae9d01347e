// Declares the C side of this package. The structures are DLPack's (dmlc/dlpack, the ABI of version 0.x, which
// every consumer reads), under our names.
#ifndef OW_MANAGED_H
#define OW_MANAGED_H

#include <stdint.h>

struct ow_device {
	int32_t type; // 1: CPU, 2: CUDA
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

// Layout of device.Block. A test compares the two.
struct ow_block {
	int64_t refs;
	void *base;
	uint64_t length;
	int64_t kind;
};

enum { OW_KIND_MAP = 0, OW_KIND_REGION = 1, OW_KIND_CUDA = 2, OW_KIND_ARENA = 3 };

// Layout of device.Listed: a block of kind OW_KIND_CUDA or OW_KIND_ARENA.
struct ow_listed {
	struct ow_block block;
	struct ow_listed *next, **list;
};

struct ow_free_list { // layout of device.FreeList
	struct ow_listed *head;
	int64_t room;
};

struct ow_wanted { // a tensor to describe
	uint64_t data;  // a pointer to its bytes, dense in C order
	uint64_t block; // a pointer to its block; 0 for memory that is never freed
	int64_t bytes;
	struct ow_type type;
	int32_t ndim, cuda; // 0: on the CPU, else 1 + the CUDA device
	uint64_t managed;   // the result, a pointer
};

// ow_managed_many describes n tensors and takes over a hold of the block of each. Their shapes are concatenated
// in dims. It returns how many it has made: fewer than n if memory runs out, and then all holds still belong to
// the caller.
int64_t ow_managed_many(struct ow_wanted *all, int64_t n, const int64_t *dims);

// ow_managed_forget frees a description. Its hold still belongs to the caller.
void ow_managed_forget(uint64_t managed);

// ow_managed_delete calls the deleter, as a consumer does.
void ow_managed_delete(void *m);

// ow_block_release releases one hold of block; [data, data+n) belonged to the holder.
void ow_block_release(struct ow_block *block, void *data, int64_t n);

// ow_fork_watch registers, once, the handler that sets ow_fork_flag in children of this process.
int ow_fork_watch(void);
int ow_fork_flag(void);

#endif
