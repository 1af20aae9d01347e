/* Structs for streams that are parsed on the device: native, raw and sized bitstreams.
 * The host has not seen their stored bytes. Plain C, fixed sizes, no padding, as in abi.h.
 *
 * A batch is a head, its streams, and a row for each chunk that the host expects.
 *
 * Decoding: ow_stream_x16 compares each stream with the host's expectations and decodes
 * its chunks. For the decoders of abi_batch.h, ow_stream_open compares the streams and
 * fills the table of rows. After the decoder, ow_stream_close collects the status of the
 * rows. These kernels read only [src, src + stored) and write only [dst, dst + size).
 *
 * Encoding: ow_stream_cut fills the rows, ow_x16_encode encodes each row to a block,
 * ow_stream_sum lays out the streams, and ow_stream_join writes them.
 *
 * Errors are bits of the stream's status word.
 */
#ifndef OVERWIRE_ABI_STREAM_H
#define OVERWIRE_ABI_STREAM_H

#include "abi.h"
#include "abi_batch.h"

/* Bytes of dynamic shared memory of ow_stream_x16. */
enum { OW_STREAM_SHARED = OW_X16_SHARED + 32 * OW_X16_WARPS };

/* One stream and the values that the host expects in it. For encoding, src and size
 * describe the content, and dst and stored the space for the stream. src and dst are then
 * multiples of 16, and so is chunk if there are several chunks. */
typedef struct ow_stream {
    uint64_t src, stored; /* device address, a multiple of 8, and bytes of the stream */
    uint64_t dst, size;   /* device address and exact bytes of the content */
    uint64_t chunk;       /* content bytes per chunk; the last chunk may be shorter */
    uint32_t first, rows; /* range in the table of rows: rows = ceil(size / chunk), at least 1 */
    uint32_t kind;        /* OW_STREAM_NATIVE, ... */
    uint32_t format;      /* nvCOMP's algorithm number (nvcompFormatType_t), or 'X' for X16 */
    uint32_t arg;         /* arg of the rows' items; encoding: the transform, or 0 for none */
    uint32_t zero;
} ow_stream; /* 64 bytes */

/* The header of a batch. Its streams follow. */
typedef struct ow_stream_head {
    uint32_t streams, rows;
    uint32_t split;         /* X16: warps that share a chunk */
    uint32_t answers;       /* encoding: byte offset from the status words to an ow_stream_peek_t per stream */
    uint64_t scratch, slot; /* encoding: space for one block per row, and bytes per block; multiples of 16 */
} ow_stream_head; /* 32 bytes */

/* A small batch. The host passes it to ow_stream_x16 as a kernel argument, with a null
 * head, so it need not copy a batch to the device first. */
enum { OW_STREAM_FEW = 16 };
typedef struct ow_stream_few {
    ow_stream_head head;
    ow_stream streams[OW_STREAM_FEW];
} ow_stream_few; /* 1056 bytes */

/* The values in a stream's header, from ow_stream_peek. ow_stream_sum also returns one per
 * stream, with the size of the encoded stream. */
typedef struct ow_stream_peek_t {
    uint64_t size, chunk;
    uint32_t format;
    uint32_t status;
} ow_stream_peek_t; /* 24 bytes */

enum { OW_STREAM_MAGIC = 0x5342574f }; /* "OWBS", the first bytes of a native stream */
enum { OW_STREAM_NATIVE = 0, OW_STREAM_RAW = 1, OW_STREAM_SIZED = 2 };
enum { OW_STREAM_LZ4 = 0, OW_STREAM_SNAPPY = 1, OW_STREAM_CASCADED = 4, OW_STREAM_X16 = 'X' };

/* Bits of a stream's status word, in addition to the X16 bits (abi.h). */
enum {
    OW_STREAM_HEADER = 1 << 8,  /* not a stream of this kind, or a damaged header */
    OW_STREAM_OTHER = 1 << 9,   /* the algorithm, length or chunk size is not the expected one */
    OW_STREAM_CHUNK = 1 << 10,  /* a chunk is outside the payload or malformed */
    OW_STREAM_PLACE = 1 << 11,  /* a native stream is not aligned to 8, or an X16 block to 16 */
    OW_STREAM_DATA = 1 << 12,   /* the decoder or the encoder refused a block */
    OW_STREAM_ROOM = 1 << 13    /* the encoded stream does not fit into its space */
};

#endif
