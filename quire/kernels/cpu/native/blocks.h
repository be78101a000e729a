/* Weights kept as integers with a scale, and perhaps a minimum, for each run of BLOCK inputs: what quantized files hold.
 * A panel is one stream of blocks:
 *
 *     float scale[NR]; float minimum[NR] (BLOCKS_MIN only); int8_t code[BLOCK][NR]
 *
 * A weight is code * scale + minimum. Codes and scales have so few bits that the product is exact, so these are the
 * float32 numbers that unpacking the file gives, bit for bit; only the memory they are read from is a third. */
#ifndef QUIRE_BLOCKS_H
#define QUIRE_BLOCKS_H

#include "simd.h"

enum { BLOCK = 32 };

INLINE long block_bytes(int kind) { return NR * (BLOCK + (kind == BLOCKS_MIN ? 8 : 4)); }

INLINE const float *block_scale(const char *block) { return (const float *)block; }
INLINE const float *block_minimum(const char *block) { return (const float *)block + NR; }
INLINE const int8_t *block_codes(int kind, const char *block) {
    return (const int8_t *)block + NR * (kind == BLOCKS_MIN ? 8 : 4);
}

/* One expression for all shapes of work, so that they round alike. */
INLINE vf block_weight(int kind, const int8_t *codes, long at, vf scale, vf minimum) {
    const vf code = load_wide(I8, codes, at);
    return kind == BLOCKS_MIN ? code * scale + minimum : code * scale;
}

/* depth inputs (whole blocks) of one panel, to float32 in the layout of a plain panel. */
INLINE void widen_blocks(int kind, const char *from, float *to, long depth) {
    for (long k = 0; k < depth; k += BLOCK, from += block_bytes(kind)) {
        const int8_t *codes = block_codes(kind, from);
        for (int j = 0; j < NV; j++) {
            const vf scale = load(block_scale(from) + j * VL);
            const vf minimum = kind == BLOCKS_MIN ? load(block_minimum(from) + j * VL) : (vf){0};
            for (long i = 0; i < BLOCK; i++)
                store(to + (k + i) * NR + j * VL, block_weight(kind, codes, i * NR + j * VL, scale, minimum));
        }
    }
}

/* One row of x over one or two panels, which lie panel_bytes apart. The sums run over k in order, as in run_tile. */
INLINE void one_row_of_blocks(int kind, const char *from, long panel_bytes, int panels, const float *x, long depth, long ahead,
                              const float *bias, float *out) {
    vf acc[2 * NV];
#pragma GCC unroll 8
    for (int j = 0; j < panels * NV; j++) acc[j] = (vf){0};
    for (long k = 0; k < depth; k += BLOCK, from += block_bytes(kind)) {
        vf scale[2 * NV], minimum[2 * NV];
#pragma GCC unroll 8
        for (int j = 0; j < panels * NV; j++) {
            const char *block = from + (j / NV) * panel_bytes;
            scale[j] = load(block_scale(block) + (j % NV) * VL);
            minimum[j] = kind == BLOCKS_MIN ? load(block_minimum(block) + (j % NV) * VL) : (vf){0};
        }
        for (long line = 0; line < block_bytes(kind); line += 64) {
            __builtin_prefetch(from + ahead + line, 0, 2);
            if (panels > 1) __builtin_prefetch(from + panel_bytes + ahead + line, 0, 2);
        }
        const int8_t *codes = block_codes(kind, from);
        for (long i = 0; i < BLOCK; i++) {
            const float s = x[k + i];
#pragma GCC unroll 8
            for (int j = 0; j < panels * NV; j++) {
                const int8_t *c = codes + (j / NV) * panel_bytes;
                acc[j] += s * block_weight(kind, c, i * NR + (j % NV) * VL, scale[j], minimum[j]);
            }
        }
    }
#pragma GCC unroll 8
    for (int j = 0; j < panels * NV; j++) {
        if (bias) acc[j] += load(bias + j * VL);
        store(out + j * VL, acc[j]);
    }
}

#endif
