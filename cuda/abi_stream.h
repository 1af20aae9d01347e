/* Streams that are opened on the device: native, raw and sized bitstreams whose
 * stored bytes the host has not seen. Rules as in abi.h: plain C, fixed sizes,
 * no padding.
 *
 * A batch is a head, its streams, and a row for every chunk that the streams should
 * have. ow_stream_x16 compares each stream with what the host expects of it, and
 * decodes its chunks. For the kernels of abi_batch, ow_stream_open compares the
 * streams and fills the table of rows that they take, and ow_stream_close collects
 * their status. To encode, ow_stream_cut fills the rows, ow_x16_encode makes a block
 * of each, ow_stream_sum lays the streams out and ow_stream_join writes them. Errors
 * are bits of the stream's status word. Nothing outside [src, src + stored) is read,
 * and nothing outside [dst, dst + size) is written.
 */
#ifndef OVERWIRE_ABI_STREAM_H
#define OVERWIRE_ABI_STREAM_H

#include "abi.h"
#include "abi_batch.h"

/* Bytes of dynamic shared memory of ow_stream_x16. */
enum { OW_STREAM_SHARED = OW_X16_SHARED + 32 * OW_X16_WARPS };

/* One stream, and what the host expects of it. When streams are made, src and size
 * describe the content, and dst and stored the space for the stream; all are
 * multiples of 16. */
typedef struct ow_stream {
    uint64_t src, stored; /* device address, a multiple of 8, and bytes */
    uint64_t dst, size;   /* of the content, exactly */
    uint64_t chunk;       /* content bytes of a chunk, all but the last */
    uint32_t first, rows; /* in the table: rows = ceil(size / chunk), or 1 */
    uint32_t kind;        /* OW_STREAM_NATIVE, ... */
    uint32_t format;      /* nvCOMP's number of the algorithm (nvcompFormatType_t); 'X' is X16 */
    uint32_t arg;         /* of the items; when made, the transform, 0 for none */
    uint32_t zero;
} ow_stream; /* 64 bytes */

/* The header of a batch. Its streams follow. */
typedef struct ow_stream_head {
    uint32_t streams, rows;
    uint32_t split;         /* X16: warps that share a chunk */
    uint32_t answers;       /* when made: offset from the status words at which ow_stream_peek_t are written */
    uint64_t scratch, slot; /* when made: space for a block of each row, and its bytes, multiples of 16 */
} ow_stream_head; /* 32 bytes */

/* A small batch. ow_stream_x16 takes it as an argument when it has no other batch:
 * nothing has to be copied first. */
enum { OW_STREAM_FEW = 16 };
typedef struct ow_stream_few {
    ow_stream_head head;
    ow_stream streams[OW_STREAM_FEW];
} ow_stream_few; /* 1056 bytes */

/* What a stream says about itself: ow_stream_peek. */
typedef struct ow_stream_peek_t {
    uint64_t size, chunk;
    uint32_t format;
    uint32_t status;
} ow_stream_peek_t; /* 24 bytes */

enum { OW_STREAM_MAGIC = 0x5342574f }; /* of native streams: "OWBS" */
enum { OW_STREAM_NATIVE = 0, OW_STREAM_RAW = 1, OW_STREAM_SIZED = 2 };
enum { OW_STREAM_LZ4 = 0, OW_STREAM_SNAPPY = 1, OW_STREAM_CASCADED = 4, OW_STREAM_X16 = 'X' };

/* Bits of a stream's word of status, above those of X16 (abi.h). */
enum {
    OW_STREAM_HEADER = 1 << 8,  /* no such stream, or a damaged header */
    OW_STREAM_OTHER = 1 << 9,   /* another algorithm, length or chunk than was expected */
    OW_STREAM_CHUNK = 1 << 10,  /* a chunk outside the payload, or of an impossible form */
    OW_STREAM_PLACE = 1 << 11,  /* a block of X16 that is not aligned to 16 */
    OW_STREAM_DATA = 1 << 12,   /* a block that its decoder refuses */
    OW_STREAM_ROOM = 1 << 13    /* more bytes than the output has space for */
};

#endif
