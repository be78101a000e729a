/* The one inner loop behind linear layers and attention: C[rows][columns] (+)= A[rows][depth] * B[depth][columns], with C
 * in registers. Every sum runs over the depth in order, in one accumulator, whatever the tile's shape: so a row's result
 * does not depend on how many rows share the call. */
#ifndef QUIRE_TILE_H
#define QUIRE_TILE_H

#include "simd.h"

typedef struct {
    const float *a; /* a[row * a_stride + k] */
    long a_stride;
    const void *b; /* column vector j of depth k: b[k * b_stride + (j / NV) * panel_stride + (j % NV) * VL] */
    long b_stride, panel_stride;
    float *c; /* c[row * c_stride + j * VL] */
    long c_stride, depth;
    int accumulate;      /* start from what c holds */
    const char *ahead; /* what to bring into the cache meanwhile: ahead_step bytes a step of depth */
    long ahead_step;
    const float *scale;  /* per column, applied when done; or NULL. With it there is always a bias */
    const float *bias;   /* per column, or NULL */
} tile;

/* rows, vectors, kind and prefetch (cache lines a step and panel) are constants wherever this is inlined: the loops over them
 * unroll and acc lives in registers. */
INLINE void run_tile(const tile *t, int rows, int vectors, int kind, int prefetch) {
    vf acc[MR][2 * NV];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++)
            acc[r][j] = t->accumulate ? load(t->c + r * t->c_stride + j * VL) : (vf){0};

    const float *a = t->a;
    const char *b = t->b;
    const long depth = t->depth, a_stride = t->a_stride, step = t->b_stride * kind_bytes(kind);
    const long ahead_step = t->ahead_step, panel_bytes = t->panel_stride * kind_bytes(kind);
    const char *ahead = t->ahead;
    for (long k = 0; k < depth; k++) {
        vf columns[2 * NV];
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++)
            columns[j] = load_wide(kind, b + (j / NV) * panel_bytes, (j % NV) * VL);
#pragma GCC unroll 4
        for (int line = 0; line < prefetch; line++) {
            __builtin_prefetch(ahead + line * 64, 0, 2);
            if (vectors > NV) __builtin_prefetch(ahead + panel_bytes + line * 64, 0, 2);
        }
        ahead += ahead_step;
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            const float s = a[r * a_stride + k];
#pragma GCC unroll 8
            for (int j = 0; j < vectors; j++) acc[r][j] += s * columns[j];
        }
        b += step;
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            vf x = acc[r][j];
            /* One expression, so that all shapes of tile round it alike. */
            if (t->scale) x = x * load(t->scale + j * VL) + load(t->bias + j * VL);
            else if (t->bias) x += load(t->bias + j * VL);
            store(t->c + r * t->c_stride + j * VL, x);
        }
}

/* One panel (NR columns) of float32, any number of rows up to MR. */
INLINE void run_panel_tile(const tile *t, int rows, int prefetch) {
    switch (rows) {
#define CASE(n) case n: run_tile(t, n, NV, F32, prefetch); break;
        CASE(1) CASE(2) CASE(3)
#if defined(__AVX2__) || defined(__aarch64__)
        CASE(4) CASE(5) CASE(6)
#endif
#if defined(__AVX512F__)
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
    }
}

/* rows split into tiles of nearly equal height: 7 rows as 4 + 3, not 6 + 1, keep both multipliers busy. */
INLINE long tile_height(long rows) {
    long tiles = (rows + MR - 1) / MR;
    return (rows + tiles - 1) / tiles;
}

/* c[rows][panels * NR] (+)= a[rows][depth] * b, tile by tile; all in this thread's buffers. */
static inline void multiply(tile t, long rows, long panels) {
    const float *a = t.a;
    const float *b = t.b;
    float *c = t.c;
    const long height = tile_height(rows), panel_stride = t.panel_stride;
    for (long panel = 0; panel < panels; panel++) {
        t.b = b + panel * panel_stride;
        for (long r = 0; r < rows; r += height) {
            t.a = a + r * t.a_stride;
            t.c = c + r * t.c_stride + panel * NR;
            run_panel_tile(&t, (int)MIN(height, rows - r), 0);
        }
    }
}

#endif
