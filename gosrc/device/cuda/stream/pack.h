// Declares encoding of device memory that is copied to the host. Chunks are encoded to the slots of a ring, and the
// results are copied to pinned memory. The ring is an arena: its host memory holds the items of all slots. Each slot
// has an event and a stream that encodes, and the remaining streams copy. Only owcu_pack_wait waits, and only for work
// of the slots.
#ifndef OWCU_PACK_H
#define OWCU_PACK_H

#include "../driver/context.h"

enum { OWCU_PACK_SLOTS = 24, OWCU_PACK_COPIERS = 2 };

struct owcu_fetch {
	void *dst;
	owcu_ptr src;
	uint64_t n;
};

// owcu_pack_launch launches kernel(items, n) with one block per item.
int owcu_pack_launch(owcu_handle ctx, const struct owcu_arena *arena, int slot, owcu_handle kernel, owcu_ptr items, uint32_t n,
                     uint32_t threads, struct owcu_error *e);
// owcu_pack_fetch queues copies of the encoded bytes to pinned memory.
int owcu_pack_fetch(owcu_handle ctx, const struct owcu_arena *arena, int slot, uint64_t n,
                    const struct owcu_fetch *copies, struct owcu_error *e);
// owcu_pack_wait waits for the slot's last encode or fetch. That work has ended even if it returns an error, unless the
// driver denied access to the context for five seconds.
int owcu_pack_wait(owcu_handle ctx, const struct owcu_arena *arena, int slot, struct owcu_error *e);

#endif
