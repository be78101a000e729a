/* Weights kept as integers with a scale, and perhaps a minimum, for each run of BLOCK inputs: what quantized files hold.
 * A panel is one stream of blocks:
 *
 *     float scale[NR]; float minimum[NR] (not in BLOCKS); codes
 *
 * with codes int8_t [BLOCK][NR], or in NIBBLES uint32_t [BLOCK / 8][NR], each word the codes of eight inputs of one output,
 * the first in its lowest bits. A weight is code * scale + minimum. Codes and scales have so few bits that the product is
 * exact, so these are the float32 numbers that unpacking the file gives, bit for bit; only the memory they are read from
 * is a third, or a fifth. */
#ifndef QUIRE_BLOCKS_H
#define QUIRE_BLOCKS_H

#include "simd.h"

enum { BLOCK = 32, WORD = 8 };

INLINE long block_head(int kind) { return NR * (kind == BLOCKS ? 4 : 8); }
INLINE long block_bytes(int kind) { return block_head(kind) + NR * (kind == NIBBLES ? BLOCK / 2 : BLOCK); }

INLINE const float *block_scale(const char *block) { return (const float *)block; }
INLINE const float *block_minimum(const char *block) { return (const float *)block + NR; }
INLINE const char *block_codes(int kind, const char *block) { return block + block_head(kind); }

/* The codes of VL outputs from column j * VL on, for the inputs from `input` on: one vector of bytes, or of words. */
typedef struct {
    vu words;
    const int8_t *bytes;
} code_run;

INLINE code_run load_codes(int kind, const char *codes, long input, int j) {
    code_run run = {.bytes = (const int8_t *)codes + input * NR + j * VL};
    if (kind == NIBBLES) run.words = *(const vu *)((const uint32_t *)codes + input / WORD * NR + j * VL);
    return run;
}

/* The i-th of the WORD inputs of a run, as float32. */
INLINE vf code_at(int kind, const code_run *run, int i) {
    if (kind != NIBBLES) return load_wide(I8, run->bytes, (long)i * NR);
    const vu shifted = run->words >> (4 * i);
#if defined(__AVX512F__)
    const __m512 integers = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return (vf)_mm512_permutexvar_ps((__m512i)shifted, integers); /* looks at the lowest four bits alone */
#else
    return __builtin_convertvector((vi)(shifted & 15), vf);
#endif
}

/* One expression for all shapes of work, so that they round alike. */
INLINE vf weight_of(int kind, vf code, vf scale, vf minimum) { return kind == BLOCKS ? code * scale : code * scale + minimum; }

/* depth inputs (whole blocks) of one panel, to float32 in the layout of a plain panel. */
INLINE void widen_blocks(int kind, const char *from, float *to, long depth) {
    for (long k = 0; k < depth; k += BLOCK, from += block_bytes(kind)) {
        const char *codes = block_codes(kind, from);
        for (int j = 0; j < NV; j++) {
            const vf scale = load(block_scale(from) + j * VL);
            const vf minimum = kind == BLOCKS ? (vf){0} : load(block_minimum(from) + j * VL);
            for (long input = 0; input < BLOCK; input += WORD) {
                const code_run run = load_codes(kind, codes, input, j);
#pragma GCC unroll 8
                for (int i = 0; i < WORD; i++)
                    store(to + (k + input + i) * NR + j * VL, weight_of(kind, code_at(kind, &run, i), scale, minimum));
            }
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
            minimum[j] = kind == BLOCKS ? (vf){0} : load(block_minimum(block) + (j % NV) * VL);
        }
        for (long line = 0; line < block_bytes(kind); line += 64) {
            __builtin_prefetch(from + ahead + line, 0, 2);
            if (panels > 1) __builtin_prefetch(from + panel_bytes + ahead + line, 0, 2);
        }
        const char *codes = block_codes(kind, from);
        for (long input = 0; input < BLOCK; input += WORD) {
            code_run run[2 * NV];
#pragma GCC unroll 8
            for (int j = 0; j < panels * NV; j++)
                run[j] = load_codes(kind, codes + (j / NV) * panel_bytes, input, j % NV);
#pragma GCC unroll 8
            for (int i = 0; i < WORD; i++) {
                const float s = x[k + input + i];
#pragma GCC unroll 8
                for (int j = 0; j < panels * NV; j++)
                    acc[j] += s * weight_of(kind, code_at(kind, &run[j], i), scale[j], minimum[j]);
            }
        }
    }
#pragma GCC unroll 8
    for (int j = 0; j < panels * NV; j++) {
        if (bias) acc[j] += load(bias + j * VL);
        store(out + j * VL, acc[j]);
    }
}

/* One number, by itself. */
INLINE float one_weight(int kind, const char *block, long column, long input) {
    const char *codes = block_codes(kind, block);
    const float minimum = kind == BLOCKS ? 0 : block_minimum(block)[column];
    int code;
    if (kind == NIBBLES) code = ((const uint32_t *)codes)[input / WORD * NR + column] >> 4 * (input % WORD) & 15;
    else code = ((const int8_t *)codes)[input * NR + column];
    return (float)code * block_scale(block)[column] + minimum;
}

#endif
