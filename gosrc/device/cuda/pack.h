// Device memory on its way to the host: chunks are encoded into the slots of a ring,
// and what came of them is copied to pinned memory. Each slot has a stream that encodes;
// two streams copy. No function but owcu_pack_wait and owcu_pack_free waits, and these
// wait for the pack's own work alone.
#ifndef OWCU_PACK_H
#define OWCU_PACK_H

#include "queue.h"

enum { OWCU_PACK_SLOTS = 24, OWCU_PACK_COPIERS = 2 };

struct owcu_fetch {
	void *dst;
	owcu_ptr src;
	uint64_t n;
};

struct owcu_pack {
	void *host; // registered: the items of all slots
	owcu_ptr mapped, device;
	owcu_handle copiers[OWCU_PACK_COPIERS];
	owcu_handle streams[OWCU_PACK_SLOTS], events[OWCU_PACK_SLOTS];
	int slots;
};

// owcu_pack_new and owcu_pack_free are as owcu_pad_new and owcu_pad_free.
int owcu_pack_new(owcu_handle ctx, struct owcu_pack *p, void *host, uint64_t n, uint64_t room, struct owcu_error *e);
int owcu_pack_free(owcu_handle ctx, struct owcu_pack *p, struct owcu_error *e);

// owcu_pack_encode launches kernel(items, n) a block an item.
int owcu_pack_encode(owcu_handle ctx, struct owcu_pack *p, int slot, owcu_handle kernel, owcu_ptr items, uint32_t n, uint32_t threads,
                     struct owcu_error *e);
// owcu_pack_fetch queues copies to pinned memory of what has been encoded.
int owcu_pack_fetch(owcu_handle ctx, struct owcu_pack *p, int slot, uint64_t n, const struct owcu_fetch *copies, struct owcu_error *e);
// owcu_pack_wait waits for the slot's last encode or fetch. Whatever it returns, that
// work has ended.
int owcu_pack_wait(owcu_handle ctx, struct owcu_pack *p, int slot, struct owcu_error *e);

#endif
