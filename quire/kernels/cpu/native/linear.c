/* Linear layers. A weight [n, k] is stored as panels of NR outputs, interleaved along k:
 *
 *     data[panel][k][NR]        the last panel padded with zeros
 *
 * so that a call streams memory in one direction at any number of rows, and a register tile's columns lie side by side.
 * Narrow types are widened in registers (one row) or, once a panel, into a buffer that all rows then reuse. */
#include "blocks.h"
#include "pool.h"
#include "tile.h"

#include <stdatomic.h>

typedef struct {
    void *data;
    const float *scale; /* [panels * NR], int8 only: one scale an output, applied to the finished sum */
    const float *bias;  /* [panels * NR]; zeros or NULL where the layer has none: NULL only without scale */
    int64_t n, k;
    int64_t kind;
} weight;

enum {
    DEPTH_BLOCK = NR == 32 ? 256 : 384, /* of k: this part of a panel stays in L1 while the rows pass over it */
    ROW_BLOCK = 96,                     /* rows whose activations stay in L2 while the panels pass */
    STREAM_AHEAD = 4096,                /* bytes between a single row's reads and its prefetches */
    MAX_SPANS = 64,
    PAIR_ROWS = 3, /* up to so many rows run over two panels at once */
};

/* Panels that one thread works through in memory's order; threads that are done help the others. */
typedef struct {
    _Alignas(64) atomic_long next; /* counts through the span once for each block of rows */
    long first_panel, num_panels;
} span;

typedef struct {
    const weight *w;
    const float *x;
    float *out;
    long rows, row_block, num_row_blocks, panels_at_once, num_spans;
    span spans[MAX_SPANS];
} linear_job;

int EXPORT(panel_columns)(void) { return NR; }

static int is_blocks(const weight *w) { return w->kind >= BLOCKS; }

/* k: with blocks, where one starts. */
static const char *panel_at(const weight *w, long panel, long k) {
    if (is_blocks(w)) return (const char *)w->data + (panel * w->k + k) / BLOCK * block_bytes((int)w->kind);
    return (const char *)w->data + (panel * w->k + k) * NR * kind_bytes((int)w->kind);
}

static void finish_with(tile *t, const weight *w, long panel) {
    t->scale = w->scale ? w->scale + panel * NR : NULL;
    t->bias = w->bias ? w->bias + panel * NR : NULL;
}

INLINE void widen(int kind, const void *from, float *to, long count) {
    for (long i = 0; i < count; i += VL) store(to + i, load_wide(kind, from, i));
}

static void widen_panel(int kind, const void *from, float *to, long depth) {
    if (kind == BF16) widen(BF16, from, to, depth * NR);
    else if (kind == F16) widen(F16, from, to, depth * NR);
    else if (kind == I8) widen(I8, from, to, depth * NR);
    else if (kind == BLOCKS) widen_blocks(BLOCKS, from, to, depth);
    else if (kind == BLOCKS_MIN) widen_blocks(BLOCKS_MIN, from, to, depth);
    else widen_blocks(NIBBLES, from, to, depth);
}

/* One row: all of the work is reading the weights. Two panels make two streams of them, and enough sums in flight to
 * hide the multipliers' latency. */
INLINE void one_row_of_kind(tile *t, int kind, long panels) {
    t->ahead = (const char *)t->b + STREAM_AHEAD;
    t->ahead_step = NR * kind_bytes(kind);
    const int lines = MAX(1, NR * kind_bytes(kind) / 64);
    if (panels == 2) run_tile(t, 1, 2 * NV, kind, lines);
    else run_tile(t, 1, NV, kind, lines);
}

static void one_row_blocks(const weight *w, const float *x, long panel, long panels, float *out) {
    const char *from = panel_at(w, panel, 0);
    const long panel_bytes = w->k / BLOCK * block_bytes((int)w->kind);
    const float *bias = w->bias ? w->bias + panel * NR : NULL;
#define CASE(kind)                                                                                                   \
    case kind:                                                                                                         \
        if (panels == 2) one_row_of_blocks(kind, from, panel_bytes, 2, x, w->k, STREAM_AHEAD, bias, out);               \
        else one_row_of_blocks(kind, from, panel_bytes, 1, x, w->k, STREAM_AHEAD, bias, out);                           \
        break;
    switch (w->kind) { CASE(BLOCKS) CASE(BLOCKS_MIN) CASE(NIBBLES) }
#undef CASE
}

static void one_row(const linear_job *job, long row, long panel, long panels, float *out) {
    const weight *w = job->w;
    if (is_blocks(w)) {
        one_row_blocks(w, job->x + row * w->k, panel, panels, out);
        return;
    }
    tile t = {.a = job->x + row * w->k, .b = panel_at(w, panel, 0), .b_stride = NR, .panel_stride = w->k * NR,
              .c = out, .depth = w->k};
    finish_with(&t, w, panel);
    if (w->kind == F32) one_row_of_kind(&t, F32, panels);
    else if (w->kind == BF16) one_row_of_kind(&t, BF16, panels);
    else if (w->kind == F16) one_row_of_kind(&t, F16, panels);
    else one_row_of_kind(&t, I8, panels);
}

/* Two or three rows of float32. */
static void panel_pair(const linear_job *job, long panel) {
    const weight *w = job->w;
    tile t = {.a = job->x, .a_stride = w->k, .b = panel_at(w, panel, 0), .b_stride = NR, .panel_stride = w->k * NR,
              .c = job->out + panel * NR, .c_stride = w->n, .depth = w->k};
    finish_with(&t, w, panel);
    t.ahead = (const char *)t.b + STREAM_AHEAD;
    t.ahead_step = NR * sizeof(float);
    enum { LINES = NR * sizeof(float) / 64 };
    if (job->rows == 2) run_tile(&t, 2, 2 * NV, F32, LINES);
    else run_tile(&t, 3, 2 * NV, F32, LINES);
}

/* Rows [row0, row1) of one whole panel. While the rows pass over one part of it, the part that follows in memory is
 * fetched, a share with each tile of rows: the weights arrive behind the arithmetic. */
static void panel_rows(const linear_job *job, long panel, long row0, long row1) {
    const weight *w = job->w;
    const int kind = (int)w->kind;
    const long rows = row1 - row0, height = tile_height(rows), num_tiles = (rows + height - 1) / height;
    const long num_blocks = (w->k + DEPTH_BLOCK - 1) / DEPTH_BLOCK;
    long block = (w->k + num_blocks - 1) / num_blocks;
    if (is_blocks(w)) block = (block + BLOCK - 1) / BLOCK * BLOCK;
    const long k_bytes = is_blocks(w) ? block_bytes(kind) / BLOCK : NR * kind_bytes(kind);
    _Alignas(64) float wide[DEPTH_BLOCK * NR];
    for (long k = 0; k < w->k; k += block) {
        tile t = {.a_stride = w->k, .b_stride = NR, .c_stride = w->n, .depth = MIN(block, w->k - k), .accumulate = k > 0};
        t.b = panel_at(w, panel, k);
        t.ahead = (const char *)t.b + t.depth * k_bytes;
        t.ahead_step = (k_bytes + num_tiles - 1) / num_tiles;
        if (k + block >= w->k) finish_with(&t, w, panel);
        if (kind != F32) {
            widen_panel(kind, t.b, wide, t.depth);
            t.b = wide;
        }
        for (long r = row0; r < row1; r += height) {
            t.a = job->x + r * w->k + k;
            t.c = job->out + r * w->n + panel * NR;
            run_panel_tile(&t, (int)MIN(height, row1 - r), NR * sizeof(float) / 64);
            t.ahead += t.depth * t.ahead_step;
        }
    }
}

/* The last panel when n is no multiple of NR: whole, into a buffer, of which the real columns are copied. */
static void ragged_panel(const linear_job *job, long panel, long row0, long row1) {
    float columns[NR];
    for (long row = row0; row < row1; row++) {
        one_row(job, row, panel, 1, columns);
        memcpy(job->out + row * job->w->n + panel * NR, columns, (size_t)(job->w->n - panel * NR) * sizeof(float));
    }
}

static void work_through(linear_job *job, span *s) {
    for (;;) {
        const long at = atomic_fetch_add_explicit(&s->next, job->panels_at_once, memory_order_relaxed);
        if (at >= job->num_row_blocks * s->num_panels) return;
        const long row0 = at / s->num_panels * job->row_block, row1 = MIN(row0 + job->row_block, job->rows);
        long panel = s->first_panel + at % s->num_panels;
        const long end = MIN(panel + job->panels_at_once, s->first_panel + s->num_panels);
        const int ragged = end * NR > job->w->n;
        if (ragged) ragged_panel(job, end - 1, row0, row1);
        const long panels = end - panel - ragged;
        if (job->rows == 1 && panels > 0) one_row(job, 0, panel, panels, job->out + panel * NR);
        else if (panels == 2) panel_pair(job, panel);
        else if (panels == 1) panel_rows(job, panel, row0, row1);
    }
}

static void linear_item(void *context, long slot) {
    linear_job *job = context;
    for (long i = 0; i < job->num_spans; i++) work_through(job, &job->spans[(slot + i) % job->num_spans]);
}

void EXPORT(linear)(quire_pool *pool, const weight *w, const float *x, float *out, int64_t rows) {
    linear_job job;
    job.w = w;
    job.x = x;
    job.out = out;
    job.rows = rows;
    job.num_row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    job.row_block = job.num_row_blocks > 1 ? ((rows + job.num_row_blocks - 1) / job.num_row_blocks + MR - 1) / MR * MR : rows;
    job.panels_at_once = rows == 1 || (rows <= PAIR_ROWS && w->kind == F32) ? 2 : 1;
    job.num_spans = MIN(quire_pool_threads(pool), MAX_SPANS);
    /* Spans end between any two panels, not between pairs: a matrix of few panels is divided evenly. */
    const long num_panels = (w->n + NR - 1) / NR;
    for (long i = 0; i < job.num_spans; i++) {
        const long first = num_panels * i / job.num_spans, end = num_panels * (i + 1) / job.num_spans;
        job.spans[i].first_panel = first;
        job.spans[i].num_panels = end - first;
        atomic_init(&job.spans[i].next, 0);
    }
    if (rows > 0) quire_parallel(pool, job.num_spans, linear_item, &job);
}

typedef struct {
    const weight *w;
    float *scale;
    const float *rows;
    long first_row, num_rows, first_panel;
} pack_job;

static void pack_item(void *context, long item) {
    const pack_job *job = context;
    const weight *w = job->w;
    const long panel = job->first_panel + item, row_end = MIN((panel + 1) * NR, job->first_row + job->num_rows);
    for (long row = MAX(panel * NR, job->first_row); row < row_end; row++) {
        const float *from = job->rows + (row - job->first_row) * w->k;
        char *to = (char *)panel_at(w, panel, 0) + row % NR * kind_bytes((int)w->kind);
        if (w->kind == F32) {
            for (long k = 0; k < w->k; k++) ((float *)to)[k * NR] = from[k];
        } else if (w->kind == BF16) {
            for (long k = 0; k < w->k; k++) ((uint16_t *)to)[k * NR] = float_to_bf16(from[k]);
        } else if (w->kind == F16) {
            for (long k = 0; k < w->k; k++) ((uint16_t *)to)[k * NR] = float_to_half(from[k]);
        } else {
            float largest = 0;
            for (long k = 0; k < w->k; k++) largest = MAX(largest, fabsf(from[k]));
            const float inverse = largest > 0 ? 127.0f / largest : 0;
            for (long k = 0; k < w->k; k++) ((int8_t *)to)[k * NR] = (int8_t)lrintf(from[k] * inverse);
            job->scale[row] = largest / 127.0f;
        }
    }
}

/* Fills rows [first_row, first_row + num_rows) from float32 [num_rows, k]; they need not align with panels. */
void EXPORT(pack)(quire_pool *pool, const weight *w, const float *rows, int64_t first_row, int64_t num_rows) {
    pack_job job = {w, (float *)w->scale, rows, first_row, num_rows, first_row / NR};
    quire_parallel(pool, (first_row + num_rows + NR - 1) / NR - job.first_panel, pack_item, &job);
}

typedef struct {
    const weight *w;
    const int8_t *codes;
    const float *scales, *minima;
    long first_row, num_rows, first_panel;
} pack_blocks_job;

static void pack_blocks_item(void *context, long item) {
    const pack_blocks_job *job = context;
    const weight *w = job->w;
    const int kind = (int)w->kind;
    const long panel = job->first_panel + item, row_end = MIN((panel + 1) * NR, job->first_row + job->num_rows);
    const long num_blocks = w->k / BLOCK;
    for (long row = MAX(panel * NR, job->first_row); row < row_end; row++) {
        const long from = row - job->first_row, column = row % NR;
        char *block = (char *)panel_at(w, panel, 0);
        for (long b = 0; b < num_blocks; b++, block += block_bytes(kind)) {
            ((float *)block_scale(block))[column] = job->scales[from * num_blocks + b];
            if (kind != BLOCKS)
                ((float *)block_minimum(block))[column] = job->minima ? job->minima[from * num_blocks + b] : 0;
            const int8_t *given = job->codes + from * w->k + b * BLOCK;
            if (kind == NIBBLES) {
                uint32_t *words = (uint32_t *)block_codes(kind, block);
                for (long input = 0; input < BLOCK; input += WORD) {
                    uint32_t word = 0;
                    for (int i = 0; i < WORD; i++) word |= (uint32_t)(given[input + i] & 15) << 4 * i;
                    words[input / WORD * NR + column] = word;
                }
            } else {
                int8_t *codes = (int8_t *)block_codes(kind, block);
                for (long i = 0; i < BLOCK; i++) codes[i * NR + column] = given[i];
            }
        }
    }
}

/* Fills rows from codes [num_rows, k], scales and minima (or NULL) [num_rows, k / BLOCK]. */
void EXPORT(pack_blocks)(quire_pool *pool, const weight *w, const int8_t *codes, const float *scales, const float *minima,
                         int64_t first_row, int64_t num_rows) {
    pack_blocks_job job = {w, codes, scales, minima, first_row, num_rows, first_row / NR};
    quire_parallel(pool, (first_row + num_rows + NR - 1) / NR - job.first_panel, pack_blocks_item, &job);
}

static void embed_blocks(const weight *w, int64_t row, float *to, float multiplier) {
    const int kind = (int)w->kind;
    const long column = row % NR;
    const char *block = panel_at(w, row / NR, 0);
    for (long k = 0; k < w->k; k += BLOCK, block += block_bytes(kind))
        for (long i = 0; i < BLOCK; i++) to[k + i] = one_weight(kind, block, column, i) * multiplier;
}

/* out[i] = multiplier * row ids[i] of w. */
void EXPORT(embed)(const weight *w, const int64_t *ids, float *out, int64_t count, float multiplier) {
    for (long i = 0; i < count; i++) {
        if (is_blocks(w)) {
            embed_blocks(w, ids[i], out + i * w->k, multiplier);
            continue;
        }
        const char *from = panel_at(w, ids[i] / NR, 0) + ids[i] % NR * kind_bytes((int)w->kind);
        const float factor = w->scale ? w->scale[ids[i]] * multiplier : multiplier;
        float *to = out + i * w->k;
        for (long k = 0; k < w->k; k++) {
            float x;
            if (w->kind == F32) {
                x = ((const float *)from)[k * NR];
            } else if (w->kind == BF16) {
                const uint32_t bits = (uint32_t)((const uint16_t *)from)[k * NR] << 16;
                memcpy(&x, &bits, 4);
            } else if (w->kind == F16) {
                x = half_to_float(((const uint16_t *)from)[k * NR]);
            } else {
                x = ((const int8_t *)from)[k * NR];
            }
            to[k] = x * factor;
        }
    }
}
