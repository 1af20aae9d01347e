// The ladder: every kernel the lab knows, one line each on what is new.
// VARIANT(number, body, transforms, warps a block, blocks an SM at least, text)
#define OW_LAB_VARIANTS(VARIANT)                                                                                   \
    VARIANT(1, Rung<1>, kBf16Only, 8, 4, "direct slots, words by global loads")                                    \
    VARIANT(2, Rung<2>, kBf16Only, 8, 4, "words staged, next block in registers")                                  \
    VARIANT(3, Rung<3>, kBf16Only, 8, 4, "alias buckets by shuffle, no table")                                     \
    VARIANT(4, Body<X16Best>, kAll, 8, 6, "words by cp.async, checked once a tile; 48 warps")                      \
    VARIANT(5, Body<Bulk512>, kAll, 8, 6, "as 4, words by bulk copies of 512 bytes")                               \
    VARIANT(6, Body<Bulk1024>, kAll, 8, 6, "as 5, 1 KiB")                                                          \
    VARIANT(7, Body<X16Best>, kBf16Only, 8, 4, "as 4, registers for 32 warps")                                     \
    VARIANT(8, Body<X16Best>, kBf16Only, 8, 8, "as 4, registers for 64 warps")                                     \
    VARIANT(9, Body<X16Best>, kBf16Only, 4, 12, "as 4, blocks of 4 warps")                                         \
    VARIANT(10, Body<Ring1024>, kBf16Only, 8, 6, "as 4, ring of 2 x 1 KiB")                                        \
    VARIANT(11, Body<Permute>, kBf16Only, 8, 6, "as 4, refill by byte permute")                                    \
    VARIANT(12, Body<MulShift>, kBf16Only, 8, 6, "as 4, x >> 8 by the multiplier")                                 \
    VARIANT(13, Body<Unroll2>, kBf16Only, 8, 6, "as 4, two tiles a turn")                                          \
    VARIANT(14, Persistent<X16Best>, kBf16Only, 8, 6, "as 4, persistent blocks, jobs by stride")                   \
    VARIANT(15, Persistent<Bulk1024>, kBf16Only, 8, 6, "as 6, persistent blocks, jobs by stride")
